#include "client/src/gpu/device_slot_pool.h"

#include <gtest/gtest.h>

#include <future>
#include <set>

namespace superoffload::client {
namespace {

TEST(DeviceSlotPoolTest, ASlotIsTakenByOneAtATime) {
  DeviceSlotPool slots(3);
  std::set<uint32_t> taken;
  for (int i = 0; i < 3; ++i) {
    uint32_t slot = 0;
    ASSERT_TRUE(slots.Take(&slot).ok());
    taken.insert(slot);
  }
  EXPECT_EQ(taken, (std::set<uint32_t>{0, 1, 2}));
}

TEST(DeviceSlotPoolTest, TakingWaitsUntilOneIsFree) {
  DeviceSlotPool slots(1);
  uint32_t slot = 7;
  ASSERT_TRUE(slots.Take(&slot).ok());
  std::future<uint32_t> next = std::async(std::launch::async, [&slots] {
    uint32_t taken = 7;
    EXPECT_TRUE(slots.Take(&taken).ok());
    return taken;
  });
  EXPECT_TRUE(slots.Free(slot));
  EXPECT_EQ(next.get(), slot);
}

// The daemon says which: it could hand one slot to two gradients.
TEST(DeviceSlotPoolTest, FreeingWhatNobodyHasTakenChangesNothing) {
  DeviceSlotPool slots(2);
  uint32_t slot = 0;
  ASSERT_TRUE(slots.Take(&slot).ok());
  EXPECT_FALSE(slots.Free(1 - slot));
  EXPECT_FALSE(slots.Free(2));
  EXPECT_FALSE(slots.Free(~0u));
  EXPECT_TRUE(slots.Free(slot));
  EXPECT_FALSE(slots.Free(slot));
  uint32_t first = 0, second = 0;
  ASSERT_TRUE(slots.Take(&first).ok());
  ASSERT_TRUE(slots.Take(&second).ok());
  EXPECT_NE(first, second);
}

TEST(DeviceSlotPoolTest, TheFirstFailureEndsEveryWait) {
  DeviceSlotPool slots(1);
  uint32_t slot = 0;
  ASSERT_TRUE(slots.Take(&slot).ok());
  std::future<Status> waits = std::async(std::launch::async, [&slots] {
    uint32_t taken = 0;
    return slots.Take(&taken);
  });
  slots.Fail(Error(Code::kUnavailable, "first"));
  slots.Fail(Error(Code::kInternal, "second"));
  EXPECT_EQ(waits.get().message, "first");
  EXPECT_EQ(slots.failure().code, Code::kUnavailable);
}

}  // namespace
}  // namespace superoffload::client
