#include "tests/support/fake_cuda/launch.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>

#include "tests/support/fake_cuda/kernels.h"
#include "tests/support/fake_cuda/machine.h"
#include "tests/support/fake_cuda/stream.h"

namespace superoffload::fake_cuda {
namespace {

constexpr unsigned kMostThreads = 1024, kMostGridX = 0x7fffffff, kMostGridYz = 0xffff, kMostBlockZ = 64;
constexpr unsigned kSharedBytes = 48 << 10;  // of a block that was granted no more
constexpr int kRegisters = 64 << 10, kWarp = 32, kMultiprocessors = 132;

// CUdevice_attribute, from 1 on.
constexpr std::array<int, 17> kAttributes = {0,
                                             kMostThreads,
                                             kMostThreads,
                                             kMostThreads,
                                             kMostBlockZ,
                                             kMostGridX,
                                             kMostGridYz,
                                             kMostGridYz,
                                             kSharedBytes,
                                             0,
                                             kWarp,
                                             0,
                                             kRegisters,
                                             0,
                                             0,
                                             0,
                                             kMultiprocessors};

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

int LaunchAttribute(int attribute) {
  return attribute > 0 && attribute < static_cast<int>(kAttributes.size()) ? kAttributes[static_cast<size_t>(attribute)]
                                                                           : 0;
}

int LoadModule(void** module) {
  std::lock_guard lock(All().mu);
  *module = All().MakeHandle();
  All().modules.insert(*module);
  CountObject(1);
  return 0;
}

int UnloadModule(void* module) {
  std::lock_guard lock(All().mu);
  if (All().modules.erase(module) == 0) return kInvalidHandle;
  std::erase_if(All().functions, [module](const auto& function) { return function.second.module == module; });
  CountObject(-1);
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

int AllowShared(void* function, int dynamic_bytes) {
  std::lock_guard lock(All().mu);
  const auto found = All().functions.find(function);
  if (found == All().functions.end()) return kInvalidHandle;
  const unsigned most = Left(ThisMachine().shared_bytes, found->second.kernel->static_bytes);
  if (dynamic_bytes < 0 || static_cast<unsigned>(dynamic_bytes) > most) return kInvalidValue;
  found->second.most_dynamic_bytes = static_cast<unsigned>(dynamic_bytes);
  return 0;
}

int Launch(void* function, Dimensions grid, Dimensions block, unsigned dynamic_bytes, void* stream, void** arguments) {
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
  return Issue(stream, [module = launched.module, run = launched.kernel->bind(arguments, grid.x, block.x)] {
    if (IsLoaded(module)) {
      run();
    } else {
      SetFault();
    }
  });
}

const char* NameOf(void* function) {
  std::lock_guard lock(All().mu);
  const auto found = All().functions.find(function);
  return found == All().functions.end() ? nullptr : found->second.kernel->name;
}

}  // namespace superoffload::fake_cuda
