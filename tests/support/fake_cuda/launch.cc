#include "tests/support/fake_cuda/launch.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "server/simulator/driver/handles.h"

namespace superoffload::fake_cuda {

using kernels::CudaFunction;
using kernels::CudaModule;

namespace {

struct Module {
  std::mutex mu;
  std::vector<CudaFunction> functions;  // of it that were found
};
struct Function {
  Function(const Kernel* kernel, const std::shared_ptr<Module>& module, unsigned most_dynamic_bytes)
      : kernel(kernel), module(module), most_dynamic_bytes(most_dynamic_bytes) {}
  const Kernel* const kernel;
  const std::weak_ptr<Module> module;
  std::atomic<unsigned> most_dynamic_bytes;  // at first what is left of 48 KiB
};
using Modules = simulator::Handles<Module>;
using Functions = simulator::Handles<Function>;

unsigned Left(unsigned bytes, unsigned taken) { return bytes - std::min(bytes, taken); }

}  // namespace

int LoadModule(Process& process, CudaModule* module, const void* image) {
  if (image == nullptr) return kInvalidValue;
  *module = Modules::Get().Add<CudaModule>(std::make_shared<Module>());
  return process.CountObject(1), kOk;
}

int UnloadModule(Process& process, CudaModule module) {
  const std::shared_ptr<Module> taken = Modules::Get().Take(module);
  if (taken == nullptr) return kInvalidHandle;
  for (const CudaFunction function : taken->functions) Functions::Get().Take(function);
  return process.CountObject(-1), kOk;
}

int GetFunction(Process&, CudaFunction* function, CudaModule module, const char* name) {
  *function = nullptr;
  const Kernel* const kernel = FindKernel(name);
  const std::shared_ptr<Module> found = Modules::Get().Find(module);
  if (found == nullptr) return kInvalidHandle;
  if (kernel == nullptr) return kNotFound;
  *function = Functions::Get().Add<CudaFunction>(
      std::make_shared<Function>(kernel, found, Left(kSharedBytes, kernel->static_bytes)));
  std::lock_guard lock(found->mu);
  return found->functions.push_back(*function), kOk;
}

int SetAttribute(Process& process, CudaFunction function, int attribute, int value) {
  const std::shared_ptr<Function> found = Functions::Get().Find(function);
  if (found == nullptr) return kInvalidHandle;
  const unsigned most = Left(process.machine().shared_bytes, found->kernel->static_bytes);
  const bool known = attribute == kernels::kCudaFunctionDynamicSharedBytes;
  if (!known || value < 0 || static_cast<unsigned>(value) > most) return kInvalidValue;
  return found->most_dynamic_bytes = static_cast<unsigned>(value), kOk;
}

int Launch(Process& process, CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
           unsigned block_y, unsigned block_z, unsigned dynamic_bytes, kernels::CudaStream stream, void** arguments,
           void**) {
  const std::shared_ptr<Function> launched = Functions::Get().Find(function);
  if (launched == nullptr) return kInvalidHandle;
  const uint64_t asked[] = {grid_x, grid_y, grid_z, block_x, block_y, block_z, uint64_t{block_x} * block_y * block_z};
  const uint64_t most[] = {kMostGridX, kMostGridYz, kMostGridYz, kMostThreads, kMostThreads, kMostBlockZ, kMostThreads};
  for (size_t i = 0; i < std::size(asked); ++i) {
    if (asked[i] < 1 || asked[i] > most[i]) return kInvalidValue;
  }
  if (dynamic_bytes > launched->most_dynamic_bytes) return kInvalidValue;
  if (asked[6] > launched->kernel->most_threads) return kOutOfResources;  // their registers do not fit
  if (grid_y * grid_z * block_y * block_z != 1) return kInvalidValue;     // the kernels here know one dimension
  const auto run = launched->kernel->bind(process, arguments, grid_x, block_x);
  return simulator::Issue(stream, [&process, launched, run](const Process::Done& done) {
    process.Work([&process, launched, run] { launched->module.expired() ? process.SetFault() : run(); }, done);
  });
}

const char* NameOf(CudaFunction function) {
  const std::shared_ptr<Function> found = Functions::Get().Find(function);
  return found == nullptr ? nullptr : found->kernel->name;
}

}  // namespace superoffload::fake_cuda
