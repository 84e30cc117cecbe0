// Streams, events and capture. Each stream is a thread that runs its work in order, each piece late at random
// (FAKE_CUDA_DELAY): so whoever forgets a wait gets wrong bits, the surer the longer the streams dawdle.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_STREAM_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_STREAM_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

namespace superoffload::fake_cuda {

// CUstreamCaptureMode, of captures and of threads.
enum class CaptureMode { kGlobal, kThreadLocal, kRelaxed };

// A capture under way, of one or more streams.
struct CaptureState {
  CaptureState(CaptureMode mode_given, std::thread::id begun_by) : mode(mode_given), thread(begun_by) {}

  const CaptureMode mode;
  const std::thread::id thread;  // which began it
  std::atomic<bool> invalidated{false};
};

// What one cuEventRecord stands for; a wait is bound to the latest when it is issued, whatever is recorded afterwards.
struct Record {
  std::atomic<bool> reached{false};
  std::shared_ptr<CaptureState> capture;  // in a graph: it never happens by itself
  std::chrono::steady_clock::time_point reached_at;

  void Await() const;
};

struct Event {
  std::shared_ptr<Record> latest;  // none: never recorded, and nobody waits
};

// Null is the default stream: the calling thread itself, as if the host computed what a trainer's GPU does. No handle is
// ever used again: who uses a stream that is destroyed learns of it (400), where hardware may take another for it, or
// end the process. CUresults.
void* MakeStream();
int DestroyStream(void* stream);
int Issue(void* stream, std::function<void()> work);
int Synchronize(void* stream);
int SynchronizeAll();
int RecordEvent(Event* event, void* stream);
int WaitForEvent(void* stream, const Event& event);
int IsCapturing(void* stream, int* status);
// Between the two, what is issued goes into a graph, which is not kept. Another stream joins when it waits for an event of
// a captured one.
int BeginCapture(void* stream, CaptureMode mode);
int EndCapture(void* stream);

// The calling thread's mode, global at first; returns the one before.
CaptureMode ExchangeCaptureMode(CaptureMode mode);

// For calls that a capture might suffer from: 0, or a CUresult where the calling thread's mode forbids them. Then the
// captures that forbid it are lost, too.
int CheckSafe();

}  // namespace superoffload::fake_cuda

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_STREAM_H_
