// Processes and their contexts.
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "server/simulator/driver/driver.h"
#include "server/simulator/driver/results.h"

namespace superoffload::simulator {

using kernels::CudaContext;
using kernels::CudaDevice;
using namespace cuda_results;

namespace {

// A context is its process.
struct Processes {
  std::mutex mu;
  std::set<const Process*> all;

  bool Has(const Process* process) {
    std::lock_guard lock(mu);
    return all.contains(process);
  }
};
Processes& AllProcesses() {
  static auto* const processes = new Processes;
  return *processes;
}

std::atomic<Process*> only_process = nullptr;
thread_local Process* entered_process = nullptr;
thread_local std::vector<Process*> contexts;  // the last one is current

}  // namespace

Process::Process(Clock* clock) : clock_(clock) {
  std::lock_guard lock(AllProcesses().mu);
  AllProcesses().all.insert(this);
}

Process::~Process() {
  std::lock_guard lock(AllProcesses().mu);
  AllProcesses().all.erase(this);
}

void Process::SetFault() { fault_ = kIllegalAddress; }

int Process::RetainContext(CudaDevice device) {
  std::lock_guard lock(mu_);
  int& retained = contexts_[device];
  if (retained == 0) {
    if (const int result = TakeContext(device); result != 0) return result;
  }
  CountObject(1);
  return ++retained, kOk;
}

int Process::ReleaseContext(CudaDevice device) {
  std::lock_guard lock(mu_);
  int& retained = contexts_[device];
  if (retained == 0) return kInvalidContext;
  if (--retained == 0) GiveContextBack(device);
  return CountObject(-1), kOk;
}

bool Process::HasContext(CudaDevice device) const {
  std::lock_guard lock(mu_);
  const auto found = contexts_.find(device);
  return found != contexts_.end() && found->second > 0;
}

InProcess::InProcess(Process* process) : before_(std::exchange(entered_process, process)) {}
InProcess::~InProcess() { entered_process = before_; }
void SetOnlyProcess(Process* process) { only_process = process; }

Process& CallingProcess() {
  Process* process = entered_process;
  if (process == nullptr && !contexts.empty()) process = contexts.back();
  if (process == nullptr) process = only_process;
  SUPEROFFLOAD_CHECK(process != nullptr, "a driver without a process");
  return *process;
}

int FindCurrent(Process** process) {
  *process = contexts.empty() ? nullptr : contexts.back();
  return *process == nullptr ? kInvalidContext : (*process)->fault();
}

namespace {

int RetainPrimary(CudaContext* context, CudaDevice device) {
  Process& process = CallingProcess();
  *context = reinterpret_cast<CudaContext>(&process);
  return process.RetainContext(device);
}
int ReleasePrimary(CudaDevice device) { return CallingProcess().ReleaseContext(device); }
int GetPrimaryState(CudaDevice device, unsigned* flags, int* active) {
  return *flags = 0, *active = CallingProcess().HasContext(device), kOk;
}
int SetCurrent(CudaContext context) {
  auto* const process = reinterpret_cast<Process*>(context);
  if (process != nullptr && !AllProcesses().Has(process)) return kInvalidContext;
  if (contexts.empty()) contexts.push_back(nullptr);
  return contexts.back() = process, kOk;
}
int PushCurrent(CudaContext context) {
  auto* const process = reinterpret_cast<Process*>(context);
  if (!AllProcesses().Has(process)) return kInvalidContext;
  return contexts.push_back(process), kOk;
}
int PopCurrent(CudaContext* context) {
  if (contexts.empty()) return kInvalidContext;
  *context = reinterpret_cast<CudaContext>(contexts.back());
  return contexts.pop_back(), kOk;
}

}  // namespace

void AddContextFunctions(kernels::CudaDriver* d) {
  d->DevicePrimaryCtxRetain = &RetainPrimary;
  d->DevicePrimaryCtxRelease = &ReleasePrimary;
  d->DevicePrimaryCtxGetState = &GetPrimaryState;
  d->CtxSetCurrent = &SetCurrent;
  d->CtxPushCurrent = &PushCurrent;
  d->CtxPopCurrent = &PopCurrent;
}

}  // namespace superoffload::simulator
