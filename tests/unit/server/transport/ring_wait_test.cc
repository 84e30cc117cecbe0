// How the two sides of a ring sleep and wake each other.
#include "superoffload/v1/ring_wait.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <optional>
#include <utility>

namespace superoffload::ring {
namespace {

// A producer that was held up between its entry and the wake-up comes to it when the consumer has taken the entry and
// announced its next sleep.
TEST(RingWaitTest, AWakeUpThatComesLateDoesNotHideTheNextSleep) {
  uint32_t tail = 1, waiting = 0;
  std::promise<void> announced;
  bool first = true;
  std::future<void> consumer = std::async(std::launch::async, [&] {
    for (TailWait wait(tail, waiting, /*head=*/1); !wait.Moved();) {
      wait.Sleep(std::nullopt, [&] {
        PublishTail(tail, waiting, 1);  // of the entry before `tail`
        if (std::exchange(first, false)) announced.set_value();
        return false;
      });
    }
  });
  announced.get_future().wait();
  PublishTail(tail, waiting, 2);
  const bool woken = consumer.wait_for(std::chrono::minutes(1)) == std::future_status::ready;
  EXPECT_TRUE(woken);
  if (!woken) FutexWakeAll(tail);
  consumer.get();
  EXPECT_EQ(waiting, 0u) << "it is awake";
}

}  // namespace
}  // namespace superoffload::ring
