#include "tests/support/fake_cuda/launch.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>

#include "tests/support/fake_cuda/kernels.h"
#include "tests/support/fake_cuda/machine.h"
#include "tests/support/fake_cuda/process.h"

namespace superoffload::fake_cuda {
namespace {

struct Function {
  const Kernel* kernel;
  void* module;
  unsigned most_dynamic_bytes;
};

struct Loaded {
  std::mutex mu;
  std::set<void*> modules;
  std::map<void*, Function> functions;
  uintptr_t handle = 0x5e0000000000;

  void* MakeHandle() { return reinterpret_cast<void*>(handle += 0x100); }
};

// Never destroyed: streams run until the process ends.
Loaded& All() {
  static auto* const all = new Loaded;
  return *all;
}

unsigned Left(unsigned bytes, unsigned taken) { return bytes - std::min(bytes, taken); }

bool IsLoaded(void* module) {
  std::lock_guard lock(All().mu);
  return All().modules.contains(module);
}

bool Exist(Dimensions d, Dimensions most) {
  return d.x >= 1 && d.y >= 1 && d.z >= 1 && d.x <= most.x && d.y <= most.y && d.z <= most.z;
}

}  // namespace

int LoadModule(Process& process, void** module) {
  std::lock_guard lock(All().mu);
  *module = All().MakeHandle();
  All().modules.insert(*module);
  process.CountObject(1);
  return 0;
}

int UnloadModule(Process& process, void* module) {
  std::lock_guard lock(All().mu);
  if (All().modules.erase(module) == 0) return kInvalidHandle;
  std::erase_if(All().functions, [module](const auto& function) { return function.second.module == module; });
  process.CountObject(-1);
  return 0;
}

int GetFunction(void** function, void* module, const char* name) {
  *function = nullptr;
  const Kernel* const kernel = FindKernel(name);
  std::lock_guard lock(All().mu);
  if (!All().modules.contains(module)) return kInvalidHandle;
  if (kernel == nullptr) return kNotFound;
  *function = All().MakeHandle();
  All().functions[*function] = {kernel, module, Left(kSharedBytes, kernel->static_bytes)};
  return 0;
}

int AllowShared(Process& process, void* function, int dynamic_bytes) {
  std::lock_guard lock(All().mu);
  const auto found = All().functions.find(function);
  if (found == All().functions.end()) return kInvalidHandle;
  const unsigned most = Left(process.machine().shared_bytes, found->second.kernel->static_bytes);
  if (dynamic_bytes < 0 || static_cast<unsigned>(dynamic_bytes) > most) return kInvalidValue;
  found->second.most_dynamic_bytes = static_cast<unsigned>(dynamic_bytes);
  return 0;
}

int Launch(Process& process, void* function, Dimensions grid, Dimensions block, unsigned dynamic_bytes,
           kernels::CudaStream stream, void** arguments) {
  Function launched;
  {
    std::lock_guard lock(All().mu);
    const auto found = All().functions.find(function);
    if (found == All().functions.end()) return kInvalidHandle;
    launched = found->second;
  }
  if (!Exist(grid, {kMostGridX, kMostGridYz, kMostGridYz})) return kInvalidValue;
  if (!Exist(block, {kMostThreads, kMostThreads, kMostBlockZ})) return kInvalidValue;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads > kMostThreads || dynamic_bytes > launched.most_dynamic_bytes) return kInvalidValue;
  if (threads > launched.kernel->most_threads) return kOutOfResources;
  // The kernels here know one dimension.
  if (grid.y * grid.z * block.y * block.z != 1) return kInvalidValue;
  const auto run = launched.kernel->bind(process, arguments, grid.x, block.x);
  return simulator::Issue(stream, [&process, module = launched.module, run](const Process::Done& done) {
    process.Work([&process, module, run] { IsLoaded(module) ? run() : process.SetFault(); }, done);
  });
}

const char* NameOf(void* function) {
  std::lock_guard lock(All().mu);
  const auto found = All().functions.find(function);
  return found == All().functions.end() ? nullptr : found->second.kernel->name;
}

}  // namespace superoffload::fake_cuda
