// Streams, events and capture. Each stream is a thread that runs its work in order, each piece late at random
// (FAKE_CUDA_DELAY): so whoever forgets a wait gets wrong bits, the surer the longer the streams dawdle.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_STREAM_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_STREAM_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace superoffload::fake_cuda {

// What one cuEventRecord stands for; a wait is bound to the latest when it is issued, whatever is recorded afterwards.
struct Record {
  std::atomic<bool> reached{false};
  bool captured = false;  // in a graph: it never happens by itself
  std::chrono::steady_clock::time_point reached_at;

  void Await() const;
};

struct Event {
  std::shared_ptr<Record> latest;  // none: never recorded, and nobody waits
};

class Stream {
 public:
  Stream();
  ~Stream();

  void Do(std::function<void()> work);
  void Synchronize();

  // Between the two, what is issued goes into a graph, which is not kept. Another stream joins when it waits for an
  // event of a captured one.
  void BeginCapture();
  void EndCapture();
  bool captures() const { return captures_; }

 private:
  void Run();

  std::atomic<bool> captures_ = false;
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool stop_ = false;
  std::thread thread_;
};

// Null is the default stream: the calling thread itself, as if the host computed what a trainer's GPU does. CUresults.
int Issue(void* stream, std::function<void()> work);
int Synchronize(void* stream);
int SynchronizeAll();
int RecordEvent(Event* event, void* stream);
int WaitForEvent(void* stream, const Event& event);
int IsCapturing(void* stream, int* status);

}  // namespace superoffload::fake_cuda

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_STREAM_H_
