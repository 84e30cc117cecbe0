// Streams of a GPU in virtual time: what is enqueued runs in order, one after the other within a stream, side by side in
// several. Events order streams among each other as CUDA's do:
//
// - a wait is for the record that was enqueued last when the wait is enqueued; later records do not matter to it;
// - a wait for an event that was never recorded passes at once.
//
// Kernels of several streams run side by side at their own speed: the pack and cast kernels beside backward are short
// and move few bytes against what backward moves.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_GPU_STREAM_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_GPU_STREAM_H_

#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/simulator/copy_engine.h"
#include "server/simulator/timeline.h"
#include "server/simulator/virtual_time.h"

namespace superoffload::simulator {

class GpuEvent {
 public:
  // Whether the record that was enqueued last has been reached; true when there is none.
  bool complete() const { return latest_ == nullptr || latest_->reached; }

 private:
  friend class GpuStream;
  struct Record {
    bool reached = false;
    std::vector<std::function<void()>> waiting;
  };
  std::shared_ptr<Record> latest_;  // shared with the operations that record it and wait for it
};

class GpuStream {
 public:
  // `time` and `timeline` must outlive this; `timeline` may be null. `lane`: where its kernels are shown.
  GpuStream(VirtualTime* time, Timeline* timeline, Lane lane = Lane::kGpu)
      : time_(time), timeline_(timeline), lane_(lane) {}

  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  // All return at once; the stream must be alive until they have run.
  void Kernel(double seconds, std::string name);
  void Copy(CopyEngine* engine, double bytes, std::string name, double limit = std::numeric_limits<double>::infinity());
  void Record(GpuEvent* event);
  void Wait(const GpuEvent& event);

  // Anything else: calls its argument when it is done; from inside of itself or later.
  using Operation = std::function<void(std::function<void()> done)>;
  void Do(Operation operation) { Enqueue(std::move(operation)); }

  // `call` runs on the host when everything before it has; the stream goes on when it returns.
  void HostCall(std::function<void()> call);

  // Does now what takes no time, instead of after whoever enqueued it: for who waits for that.
  void Flush();

  // Nothing of it happens any more, whatever was enqueued.
  void Abort();

  bool idle() const { return !running_; }
  double busy_seconds() const { return busy_seconds_; }  // of kernels that are done

 private:
  void Enqueue(Operation operation);
  void Run();

  VirtualTime* const time_;
  Timeline* const timeline_;
  const Lane lane_;
  std::deque<Operation> operations_;  // that have not begun
  bool running_ = false;              // one is under way, or Run is about to be called
  bool about_to_run_ = false;         // the latter
  bool aborted_ = false;
  bool inside_ = false;               // of an operation's call
  bool done_inside_ = false;
  double busy_seconds_ = 0;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_GPU_STREAM_H_
