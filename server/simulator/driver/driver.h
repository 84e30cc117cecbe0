// The CUDA driver where there is none, as far as one process sees it: contexts, streams, events and captures, with the
// driver's rules. A thread without a current context can do next to nothing; once something has touched memory that is
// not there, every call fails.
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

// One process's use of its GPUs. Functions that end in a context of it find it there.
class Process {
 public:
  explicit Process(Clock* clock);
  virtual ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // Its functions; of the process that the calling thread's context is of.
  virtual const kernels::CudaDriver& driver() const = 0;

  // What a device's first context costs; a CUresult.
  virtual int TakeContext(kernels::CudaDevice) { return 0; }
  virtual void GiveContextBack(kernels::CudaDevice) {}

  Clock& clock() const { return *clock_; }

  // The CUresult with which every call ends once a kernel or a copy touched memory that is not there, or 0.
  int fault() const { return fault_; }
  virtual void SetFault();

  // Contexts, streams, events and what else has been made and not yet been given back.
  void CountObject(int by) { objects_ += by; }
  int objects() const { return objects_; }

  int RetainContext(kernels::CudaDevice device);
  int ReleaseContext(kernels::CudaDevice device);
  bool HasContext(kernels::CudaDevice device) const;

 private:
  Clock* const clock_;
  std::atomic<int> fault_{0};
  std::atomic<int> objects_{0};
  mutable std::mutex mu_;
  std::map<kernels::CudaDevice, int> contexts_;  // how often each was retained
};

// Whose process the calling thread is, while this lives: for calls that need no context. Where a program has one
// process only, that is everybody's.
class InProcess {
 public:
  explicit InProcess(Process* process);
  ~InProcess();
  InProcess(const InProcess&) = delete;
  InProcess& operator=(const InProcess&) = delete;

 private:
  Process* const before_;
};
void SetOnlyProcess(Process* process);
// That of the current context, or the one that the thread is in.
Process& CallingProcess();

// The process whose context is current; else a CUresult, which what needs a context ends with.
int FindCurrent(Process** process);
// And for calls that a capture might suffer from: those that the calling thread's mode forbids, by which the captures
// that forbid it are lost, too.
int FindCurrentAndSafe(Process** process);
int CheckSafe();

// Enqueues on a stream, or on the calling thread, whose context is current.
int Issue(kernels::CudaStream stream, Stream::Operation operation);
int Synchronize(kernels::CudaStream stream);

// A stream that somebody else made, and whose handle dies with the result.
std::shared_ptr<void> Lend(Stream* stream, kernels::CudaStream* handle);
// Null: there is none.
std::shared_ptr<Stream> FindStream(kernels::CudaStream handle);

// Fills in contexts, streams, events and captures; the latter only contexts.
void AddCommonFunctions(kernels::CudaDriver* driver);
void AddContextFunctions(kernels::CudaDriver* driver);

// What the product does not call.
int SynchronizeContext();
int BeginCapture(kernels::CudaStream stream, CaptureMode mode);
int EndCapture(kernels::CudaStream stream);

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_DRIVER_H_
