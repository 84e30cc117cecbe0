// Processes and their contexts.
#include <utility>
#include <vector>

#include "kernels/base/check.h"
#include "server/simulator/driver/driver.h"
#include "server/simulator/driver/handles.h"

namespace superoffload::simulator {

using kernels::CudaContext;
using kernels::CudaDevice;
using namespace cuda_results;

namespace {

thread_local Process* entered_process = nullptr;
thread_local std::vector<CudaContext> contexts;  // the last one is current

Process* CurrentProcess() { return contexts.empty() ? nullptr : Handles<Process>::Get().Find(contexts.back()).get(); }

Process& CallingProcess() {
  Process* const process = entered_process != nullptr ? entered_process : CurrentProcess();
  SUPEROFFLOAD_CHECK(process != nullptr, "a driver without a process");
  return *process;
}

}  // namespace

Process::Process(Clock* clock)
    : clock_(clock), context_(Handles<Process>::Get().Add<CudaContext>({this, [](Process*) {}})) {}
Process::~Process() { Handles<Process>::Get().Take(context_); }

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

bool Process::HasContext(CudaDevice device) {
  std::lock_guard lock(mu_);
  return contexts_[device] > 0;
}

InProcess::InProcess(Process* process) : before_(std::exchange(entered_process, process)) {}
InProcess::~InProcess() { entered_process = before_; }

int FindProcess(Needs needs, Process** process) {
  *process = needs == Needs::kProcess ? &CallingProcess() : CurrentProcess();
  if (*process == nullptr) return kInvalidContext;
  const int fault = (*process)->fault();
  return fault == kOk && needs == Needs::kContextAndSafe ? CheckSafe() : fault;
}

namespace {

int RetainPrimary(Process& process, CudaContext* context, CudaDevice device) {
  return *context = process.context(), process.RetainContext(device);
}
int ReleasePrimary(CudaDevice device) { return CallingProcess().ReleaseContext(device); }
int GetPrimaryState(CudaDevice device, unsigned* flags, int* active) {
  return *flags = 0, *active = CallingProcess().HasContext(device), kOk;
}
int SetCurrent(CudaContext context) {
  if (context != nullptr && Handles<Process>::Get().Find(context) == nullptr) return kInvalidContext;
  if (contexts.empty()) contexts.push_back(nullptr);
  return contexts.back() = context, kOk;
}
int PushCurrent(CudaContext context) {
  if (Handles<Process>::Get().Find(context) == nullptr) return kInvalidContext;
  return contexts.push_back(context), kOk;
}
int PopCurrent(CudaContext* context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  return contexts.pop_back(), kOk;
}

}  // namespace

void AddContextFunctions(kernels::CudaDriver* d) {
  d->DevicePrimaryCtxRetain = &Call<Needs::kProcess, &RetainPrimary>;
  d->DevicePrimaryCtxRelease = &ReleasePrimary;
  d->DevicePrimaryCtxGetState = &GetPrimaryState;
  d->CtxSetCurrent = &SetCurrent;
  d->CtxPushCurrent = &PushCurrent;
  d->CtxPopCurrent = &PopCurrent;
}

}  // namespace superoffload::simulator
