#include "tests/support/fake_cuda/launch.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "server/simulator/driver/handles.h"
#include "tests/support/fake_cuda/kernels.h"
#include "tests/support/fake_cuda/machine.h"
#include "tests/support/fake_cuda/process.h"

namespace superoffload::fake_cuda {
namespace {

struct Module {
  std::mutex mu;
  std::vector<void*> functions;  // of it that were found
};
struct Function {
  const Kernel* kernel;
  std::weak_ptr<Module> module;
  std::atomic<unsigned> most_dynamic_bytes;
};

// Never destroyed: streams run until the program ends.
simulator::Handles<Module>& Modules() {
  static auto* const modules = new simulator::Handles<Module>(0x5e0000000000);
  return *modules;
}
simulator::Handles<Function>& Functions() {
  static auto* const functions = new simulator::Handles<Function>(0x5c0000000000);
  return *functions;
}

unsigned Left(unsigned bytes, unsigned taken) { return bytes - std::min(bytes, taken); }

bool Exist(Dimensions d, Dimensions most) {
  return d.x >= 1 && d.y >= 1 && d.z >= 1 && d.x <= most.x && d.y <= most.y && d.z <= most.z;
}

}  // namespace

int LoadModule(Process& process, void** module) {
  *module = Modules().Add(std::make_shared<Module>());
  return process.CountObject(1), kOk;
}

int UnloadModule(Process& process, void* module) {
  const std::shared_ptr<Module> taken = Modules().Take(module);
  if (taken == nullptr) return kInvalidHandle;
  for (void* const function : taken->functions) Functions().Take(function);
  return process.CountObject(-1), kOk;
}

int GetFunction(void** function, void* module, const char* name) {
  *function = nullptr;
  const Kernel* const kernel = FindKernel(name);
  const std::shared_ptr<Module> found = Modules().Find(module);
  if (found == nullptr) return kInvalidHandle;
  if (kernel == nullptr) return kNotFound;
  *function = Functions().Add(std::make_shared<Function>(kernel, found, Left(kSharedBytes, kernel->static_bytes)));
  std::lock_guard lock(found->mu);
  return found->functions.push_back(*function), kOk;
}

int AllowShared(Process& process, void* function, int dynamic_bytes) {
  const std::shared_ptr<Function> found = Functions().Find(function);
  if (found == nullptr) return kInvalidHandle;
  const unsigned most = Left(process.machine().shared_bytes, found->kernel->static_bytes);
  if (dynamic_bytes < 0 || static_cast<unsigned>(dynamic_bytes) > most) return kInvalidValue;
  found->most_dynamic_bytes = static_cast<unsigned>(dynamic_bytes);
  return kOk;
}

int Launch(Process& process, void* function, Dimensions grid, Dimensions block, unsigned dynamic_bytes,
           kernels::CudaStream stream, void** arguments) {
  const std::shared_ptr<Function> launched = Functions().Find(function);
  if (launched == nullptr) return kInvalidHandle;
  if (!Exist(grid, {kMostGridX, kMostGridYz, kMostGridYz})) return kInvalidValue;
  if (!Exist(block, {kMostThreads, kMostThreads, kMostBlockZ})) return kInvalidValue;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads > kMostThreads || dynamic_bytes > launched->most_dynamic_bytes) return kInvalidValue;
  if (threads > launched->kernel->most_threads) return kOutOfResources;
  // The kernels here know one dimension.
  if (grid.y * grid.z * block.y * block.z != 1) return kInvalidValue;
  const auto run = launched->kernel->bind(process, arguments, grid.x, block.x);
  return simulator::Issue(stream, [&process, launched, run](const Process::Done& done) {
    process.Work([&process, launched, run] { launched->module.expired() ? process.SetFault() : run(); }, done);
  });
}

const char* NameOf(void* function) {
  const std::shared_ptr<Function> found = Functions().Find(function);
  return found == nullptr ? nullptr : found->kernel->name;
}

}  // namespace superoffload::fake_cuda
