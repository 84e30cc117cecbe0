#include "client/src/core/trainers.h"

#include <map>
#include <mutex>
#include <utility>

namespace superoffload::client {
namespace {

struct Table {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Trainer>> trainers;
  int64_t last = 0;
};

// Never destroyed: XLA's threads may call handlers while the process ends.
Table& Trainers() {
  static auto* const table = new Table;
  return *table;
}

}  // namespace

int64_t AddTrainer(std::unique_ptr<Trainer> trainer) {
  Table& table = Trainers();
  const std::lock_guard lock(table.mutex);
  table.trainers.emplace(++table.last, std::move(trainer));
  return table.last;
}

Status FindTrainer(int64_t number, std::shared_ptr<Trainer>* trainer) {
  Table& table = Trainers();
  const std::lock_guard lock(table.mutex);
  const auto found = table.trainers.find(number);
  if (found == table.trainers.end()) {
    return Error(Code::kFailedPrecondition,
                 "the optimizer of this call is closed; build a new one, and the functions that were compiled for it");
  }
  *trainer = found->second;
  return {};
}

void RemoveTrainer(int64_t number) {
  std::shared_ptr<Trainer> removed;
  Table& table = Trainers();
  {
    const std::lock_guard lock(table.mutex);
    const auto found = table.trainers.find(number);
    if (found == table.trainers.end()) return;
    removed = std::move(found->second);
    table.trainers.erase(found);
  }
  removed->Leave();  // waits for a call that submits
}

}  // namespace superoffload::client
