// What a predecessor left in the descriptor store, damaged anywhere in its headers: it is adopted or refused with a
// status, and the daemon lives on.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "server/checkpoint/scheduler.h"
#include "server/engine/record.h"
#include "server/engine/worker_threads.h"
#include "server/optimizer/optimizer_table.h"
#include "server/rpc/durable.h"
#include "server/rpc/from_proto.h"

using namespace superoffload;

namespace {

class NullObserver final : public optimizer::OptimizerObserver {
  void OnPass(const optimizer::OptimizerId&, const engine::PassReport&) override {}
  void OnStep(const optimizer::OptimizerId&, const engine::StepReport&) override {}
  void OnCheckpoint(const optimizer::OptimizerId&, const optimizer::CheckpointReport&) override {}
  void OnDelete(const optimizer::OptimizerId&) override {}
};

class NullStore final : public optimizer::DescriptorStore {
  absl::Status Keep(const std::string&, const std::vector<int>&) override { return absl::OkStatus(); }
  void Drop(const std::string&) override {}
};

v1::CreateOptimizerRequest Request(bool in_place, const char* algorithm) {
  v1::CreateOptimizerRequest request;
  request.set_name("fuzzed");
  request.set_algorithm(algorithm);
  request.set_logged_buckets(in_place ? 0 : 1);
  request.set_log_slots(in_place ? 0 : 3);
  request.set_in_place(in_place);
  request.set_gradient_slots(1);
  request.add_groups();
  v1::Parameter* const parameter = request.add_parameters();
  parameter->set_name("w");
  parameter->add_shape(3000);
  parameter->set_dtype(v1::DATA_TYPE_BFLOAT16);
  return request;
}

}  // namespace

// The input: edits of five bytes each, part, offset (two), value, and how many bytes get it. The description's checksum
// hides most of it, so the first byte says whether the description is rewritten with the rest of the input instead.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static engine::WorkerThreads pool(1);
  static const v1::CreateOptimizerRequest requests[] = {Request(false, "adamw"), Request(true, "adamw"),
                                                        Request(false, "adamw_8bit_bf16_masters")};
  static const engine::Layout layouts[] = {*engine::PlanLayout(*rpc::ToSpec(requests[0])),
                                           *engine::PlanLayout(*rpc::ToSpec(requests[1])),
                                           *engine::PlanLayout(*rpc::ToSpec(requests[2]))};
  if (size == 0) return 0;
  const size_t choice = data[0] / 4 % std::size(requests);
  const v1::CreateOptimizerRequest& request = requests[choice];
  const engine::Layout& layout = layouts[choice];
  optimizer::HostedMemory memory = *optimizer::HostedMemory::Create(layout, rpc::Describe(1000, request), {});
  engine::Record(memory.record.data(), layout);
  if (data[0] % 4 == 3) {
    memory.Describe(std::string(reinterpret_cast<const char*>(data) + 1, size - 1)).IgnoreError();
  } else {
    for (++data, --size; size >= 5; data += 5, size -= 5) {
      const memory::SharedMemory& part = data[0] % 2 == 0 ? memory.record : memory.description;
      const size_t offset = (data[1] | data[2] << 8) % part.bytes();
      std::memset(part.data() + offset, data[3], std::min<size_t>(data[4] % 17, part.bytes() - offset));
    }
  }
  std::vector<memory::FileDescriptor> fds;
  for (const int fd : memory.fds()) fds.emplace_back(::dup(fd));
  memory::MemoryBudget budget(uint64_t{1} << 30);
  NullObserver observer;
  NullStore store;
  checkpoint::Scheduler scheduler(&observer);
  optimizer::OptimizerTable table({.per_user = 16}, {}, &budget, &pool, &observer, &store);
  const absl::Status adopted = rpc::Adopt(table, scheduler, {1000, "fuzzed"}, std::move(fds));
  if (!adopted.ok() && adopted.message().empty()) std::abort();
  scheduler.Shutdown();
  return 0;
}
