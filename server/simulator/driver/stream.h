// Streams and events of a GPU, whatever the clock: what is enqueued runs in order, one after the other within a stream,
// side by side in several. Events order streams among each other as CUDA's do:
//
// - a wait is for the record that was enqueued last when the wait is enqueued; later records do not matter to it;
// - a wait for an event that was never recorded passes at once;
// - what is enqueued on a stream that is captured goes into a graph, which is not kept: it never happens.
//
// How a stream's work is made to progress is the clock's: in virtual time (../gpu_stream.h), or by a thread of its own.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_STREAM_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_STREAM_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace superoffload::simulator {

// CUstreamCaptureMode, of captures and of threads.
enum class CaptureMode { kGlobal, kThreadLocal, kRelaxed };

// A capture under way, of one or more streams.
struct Capture {
  explicit Capture(CaptureMode mode) : mode(mode) {}
  const CaptureMode mode;
  const std::thread::id thread = std::this_thread::get_id();  // which began it
  std::atomic<bool> invalidated{false};
};

// What one record of an event stands for.
class EventRecord {
 public:
  explicit EventRecord(std::shared_ptr<Capture> captured) : capture(std::move(captured)) {}

  bool reached() const { return reached_.load(std::memory_order_acquire); }
  double reached_at() const { return reached_at_; }  // seconds of the clock, once it is

  void Reach(double now);
  // Calls `then` once it is reached: now, or by whoever reaches it.
  void Then(std::function<void()> then);

  const std::shared_ptr<Capture> capture;  // of which it is a part: then it never happens by itself

 private:
  std::mutex mu_;
  std::atomic<bool> reached_{false};
  double reached_at_ = 0;
  std::vector<std::function<void()>> waiting_;
};

struct GpuEvent {
  // Whether the record that was enqueued last has been reached; true when there is none.
  bool complete() const { return latest == nullptr || latest->reached(); }

  std::shared_ptr<EventRecord> latest;  // shared with the operations that record it and wait for it; null: none
};

// Thread-safe where its clock has threads.
class Stream {
 public:
  Stream() = default;
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // All return at once; the stream must be alive until they have run.
  void Record(GpuEvent* event);
  void Wait(const GpuEvent& event);

  // Anything else: calls its argument when it is done; from inside of itself or later, once.
  using Operation = std::function<void(std::function<void()> done)>;
  void Do(Operation operation);

  // `call` runs on the host when everything before it has; the stream goes on when it returns.
  void HostCall(std::function<void()> call);

  // Nothing of it happens any more, whatever was enqueued.
  void Abort();

  bool idle() const;

  // Returns when it is idle, or, where nobody can wait, does now what takes no time; then the rest is a mistake.
  virtual void Synchronize() = 0;

  // Null: none is under way.
  std::shared_ptr<Capture> capture() const;
  // Returns the one before.
  std::shared_ptr<Capture> SetCapture(std::shared_ptr<Capture> capture);

 protected:
  // Has Run called soon, not from inside of this call: a host call may not run before what enqueued it goes on.
  virtual void Begin() = 0;
  // Has Run called: what it left under way is done.
  virtual void Continue() = 0;
  // Before each operation.
  virtual void Dawdle() {}
  virtual double Now() const = 0;

  void Run();
  void AwaitIdle();

 private:
  enum class UnderWay { kInside, kOutside, kDone };  // of the call of an operation

  void OperationDone();

  mutable std::mutex mu_;
  std::condition_variable became_idle_;
  std::deque<Operation> operations_;  // that have not begun
  bool running_ = false;              // one is under way, or Run is about to be called
  bool aborted_ = false;
  UnderWay under_way_ = UnderWay::kOutside;
  std::shared_ptr<Capture> capture_;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_STREAM_H_
