#include "server/simulator/virtual_time.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace superoffload::simulator {
namespace {

using ::testing::ElementsAre;

TEST(VirtualTimeTest, EventsHappenByTimeAndThenInTheOrderOfInsertion) {
  VirtualTime time;
  std::vector<std::string> happened;
  time.After(2, [&] { happened.push_back("late"); });
  time.After(1, [&] { happened.push_back("first"); });
  time.After(1, [&] { happened.push_back("second"); });
  time.Run();
  EXPECT_THAT(happened, ElementsAre("first", "second", "late"));
  EXPECT_EQ(time.now(), 2);
}

TEST(VirtualTimeTest, AnEventMayAskForOthers) {
  VirtualTime time;
  std::vector<double> times;
  time.After(1, [&] {
    time.After(0, [&] { times.push_back(time.now()); });
    time.After(3, [&] { times.push_back(time.now()); });
  });
  time.Run();
  EXPECT_THAT(times, ElementsAre(1, 4));
}

TEST(VirtualTimeTest, ACancelledEventDoesNotHappenNorMoveTheClock) {
  VirtualTime time;
  const VirtualTime::Event event = time.After(5, [] { FAIL(); });
  time.After(1, [] {});
  time.Cancel(event);
  time.Run();
  EXPECT_EQ(time.now(), 1);
  EXPECT_EQ(time.pending(), 0u);
}

}  // namespace
}  // namespace superoffload::simulator
