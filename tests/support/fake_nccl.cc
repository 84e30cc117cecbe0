// A libnccl.so.2 whose ranks are threads of one process and whose GPU is the fake one (fake_cuda/). Sums in
// the order of ranks.
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/adam/adam_element.h"
#include "kernels/float_conversion.h"

// Of the fake driver.
extern "C" int fakeCudaIssue(void* stream, void (*work)(void*), void* argument);
extern "C" uint64_t fakeCudaAlias(uint64_t pointer);

namespace {

using superoffload::kernels::DType;

struct Id {
  char bytes[128];
};

struct Group {
  explicit Group(int ranks) : barrier(ranks), from(static_cast<size_t>(ranks)) {}
  std::barrier<> barrier;
  std::vector<const std::byte*> from;
};

struct Communicator {
  std::shared_ptr<Group> group;
  int rank;
};

struct Call {
  Communicator communicator;
  const std::byte* from;
  std::byte* to;
  size_t elements;
  DType dtype;
  bool reduces, averages;

  void Run() const {
    Group& group = *communicator.group;
    const auto rank = static_cast<size_t>(communicator.rank);
    const size_t bytes = elements * superoffload::kernels::DTypeBytes(dtype);
    group.from[rank] = from;
    group.barrier.arrive_and_wait();
    if (reduces) {
      for (size_t i = 0; i < elements; ++i) {
        float sum = 0;
        for (const std::byte* of : group.from) {
          sum += superoffload::kernels::LoadElement({of, dtype}, rank * elements + i);
        }
        superoffload::kernels::StoreElement({to, dtype}, i,
                                            averages ? sum / static_cast<float>(group.from.size()) : sum);
      }
    } else {
      for (size_t i = 0; i < group.from.size(); ++i) std::memcpy(to + i * bytes, group.from[i], bytes);
    }
    group.barrier.arrive_and_wait();
  }
};

int Issue(const Call& call, void* stream) {
  return fakeCudaIssue(
      stream,
      [](void* argument) {
        const std::unique_ptr<Call> owned(static_cast<Call*>(argument));
        owned->Run();
      },
      new Call(call));
}

// Where the GPU's work finds it.
std::byte* OnGpu(const void* pointer) {
  return reinterpret_cast<std::byte*>(fakeCudaAlias(reinterpret_cast<uint64_t>(pointer)));
}

DType ToDType(int number) { return number == 6 ? DType::kFloat16 : number == 9 ? DType::kBFloat16 : DType::kFloat32; }

}  // namespace

extern "C" {

int ncclGetUniqueId(Id* id) {
  static int last = 0;
  *id = {};
  std::memcpy(id->bytes, &++last, sizeof(last));
  return 0;
}

int ncclCommInitRank(Communicator** communicator, int ranks, Id id, int rank) {
  static std::mutex mu;
  static std::map<std::string, std::weak_ptr<Group>> groups;
  std::lock_guard lock(mu);
  std::weak_ptr<Group>& known = groups[std::string(id.bytes, sizeof(id.bytes))];
  std::shared_ptr<Group> group = known.lock();
  if (group == nullptr) known = group = std::make_shared<Group>(ranks);
  *communicator = new Communicator{std::move(group), rank};
  return 0;
}

int ncclCommDestroy(Communicator* communicator) { return delete communicator, 0; }

int ncclReduceScatter(const void* from, void* to, size_t elements, int dtype, int operation, Communicator* communicator,
                      void* stream) {
  return Issue({*communicator, OnGpu(from), OnGpu(to), elements, ToDType(dtype), true, operation == 4}, stream);
}

int ncclAllGather(const void* from, void* to, size_t elements, int dtype, Communicator* communicator, void* stream) {
  return Issue({*communicator, OnGpu(from), OnGpu(to), elements, ToDType(dtype), false, false}, stream);
}

const char* ncclGetErrorString(int) { return "an error"; }

}  // extern "C"
