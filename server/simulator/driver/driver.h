// The CUDA driver where there is none, as far as one process sees it: contexts, streams, events and captures, with the
// driver's rules. A thread without a current context can do next to nothing; once something has touched memory that is
// not there, every call fails but those that give streams, events and contexts back.
//
// Two things are passed in. The clock makes streams, and says how their work progresses: in virtual time
// (../simulated_cuda.h), or by threads. The process says what else there is: what its table of functions has of
// devices, memory, copies and launches.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_DRIVER_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_DRIVER_H_

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "kernels/gpu/cuda_driver.h"
#include "server/simulator/driver/stream.h"

namespace superoffload::simulator {

// CUresults that calls end with.
namespace cuda_results {
inline constexpr int kOk = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidContext = 201,
                     kEccUncorrectable = 214, kInvalidHandle = 400, kNotFound = 500, kIllegalAddress = 700,
                     kOutOfResources = 701, kAlreadyRegistered = 712, kNotRegistered = 713, kCaptureUnsupported = 900,
                     kCaptureInvalidated = 901, kCaptureIsolation = 905, kCaptureImplicit = 906, kCapturedEvent = 907;
}  // namespace cuda_results

// A copy between the GPU and the host.
struct GpuCopy {
  bool to_gpu;
  kernels::CudaPointer gpu;
  std::byte* host;
  size_t bytes;
};

class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::shared_ptr<Stream> MakeStream() = 0;
  // Has the calling thread do it, as the default stream: returns when it is done. A CUresult.
  virtual int DoNow(const Stream::Operation& operation) = 0;
  // Returns when it is reached.
  virtual void Await(const EventRecord& record) = 0;
  virtual double Now() const = 0;  // seconds
};

// One process's use of its GPUs. It is its context, too.
class Process {
 public:
  explicit Process(Clock* clock);
  virtual ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // Its functions; of the process that the calling thread's context is of.
  virtual const kernels::CudaDriver& driver() const = 0;

  // Enqueues a copy; a CUresult, as of all that follow.
  virtual int Copy(const GpuCopy& copy, kernels::CudaStream stream) = 0;

  // What a device's first context costs.
  virtual int TakeContext(kernels::CudaDevice) { return 0; }
  virtual void GiveContextBack(kernels::CudaDevice) {}

  Clock& clock() const { return *clock_; }

  // The CUresult with which every call ends once a kernel or a copy touched memory that is not there, or 0.
  int fault() const { return fault_; }
  virtual void SetFault();

  // Contexts, streams, events and what else has been made and not yet been given back.
  void CountObject(int by) { objects_ += by; }
  int objects() const { return objects_; }

  kernels::CudaContext context() const { return context_; }
  int RetainContext(kernels::CudaDevice device);
  int ReleaseContext(kernels::CudaDevice device);
  bool HasContext(kernels::CudaDevice device);

 private:
  Clock* const clock_;
  const kernels::CudaContext context_;
  std::atomic<int> fault_{0};
  std::atomic<int> objects_{0};
  std::mutex mu_;
  std::map<kernels::CudaDevice, int> contexts_;  // how often each was retained
};

// Whose process the calling thread is, while this lives: for calls that need no context.
class InProcess {
 public:
  explicit InProcess(Process* process);
  ~InProcess();
  InProcess(const InProcess&) = delete;
  InProcess& operator=(const InProcess&) = delete;

 private:
  Process* const before_;
};

// What a call needs: a process, which is that of the current context if the thread is in none; or a current context; or
// also that no capture forbids it to the calling thread's mode. The captures that do are lost.
enum class Needs { kProcess, kContext, kContextAndSafe };
// The CUresult that the call ends with if it has not what it needs.
int FindProcess(Needs needs, Process** process);
int CheckSafe();  // the last of them alone

// A function of a driver's table that calls `function(process, arguments...)`.
template <Needs needs, auto function, typename... Arguments>
int Call(Arguments... arguments) {
  Process* process;
  const int result = FindProcess(needs, &process);
  return result != 0 ? result : function(*process, arguments...);
}

// Enqueues on a stream, or on the calling thread, whose context is current.
int Issue(kernels::CudaStream stream, Stream::Operation operation);
int Synchronize(kernels::CudaStream stream);

// A stream that somebody else made, and whose handle dies with the result.
std::shared_ptr<void> Lend(Stream* stream, kernels::CudaStream* handle);
// Null: there is none.
std::shared_ptr<Stream> FindStream(kernels::CudaStream handle);

// Fills in contexts, streams, events, captures and copies; the latter only contexts.
void AddCommonFunctions(kernels::CudaDriver* driver);
void AddContextFunctions(kernels::CudaDriver* driver);

// What the product does not call.
int SynchronizeContext();
int BeginCapture(kernels::CudaStream stream, CaptureMode mode);
int EndCapture(kernels::CudaStream stream);

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_DRIVER_H_
