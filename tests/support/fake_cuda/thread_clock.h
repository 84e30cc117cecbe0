// The wall clock of the fake driver. Each stream is a thread that runs its work in order, each piece late at random: so
// whoever forgets a wait gets wrong bits, the surer the longer the streams dawdle. The default stream is the calling
// thread itself, as if the host computed what a trainer's GPU does.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_THREAD_CLOCK_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_THREAD_CLOCK_H_

#include <functional>
#include <memory>

#include "server/simulator/driver/driver.h"

namespace superoffload::fake_cuda {

class ThreadClock final : public simulator::Clock {
 public:
  // `delay()`: microseconds by which a piece of a stream's work is delayed at most; asked as the stream is made.
  explicit ThreadClock(std::function<int()> delay) : delay_(std::move(delay)) {}

  std::shared_ptr<simulator::Stream> MakeStream() override;
  int DoNow(const simulator::Stream::Operation& operation) override;
  void Await(const simulator::EventRecord& record) override;
  double Now() const override;

 private:
  const std::function<int()> delay_;
};

}  // namespace superoffload::fake_cuda

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_THREAD_CLOCK_H_
