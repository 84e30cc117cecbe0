#include "server/rpc/bounded_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace superoffload::rpc {
namespace {

TEST(BoundedCallsTest, AUserHasSoManyAndAllHaveSoMany) {
  BoundedCalls calls(2, 3, "large answers");
  std::vector<std::unique_ptr<BoundedCalls::Place>> places;
  for (const uid_t uid : {7, 7, 8}) {
    absl::StatusOr<std::unique_ptr<BoundedCalls::Place>> place = calls.Begin(uid);
    ASSERT_TRUE(place.ok()) << place.status();
    places.push_back(*std::move(place));
  }
  EXPECT_EQ(calls.Begin(9).status().code(), absl::StatusCode::kResourceExhausted);
  places.pop_back();
  const absl::Status third = calls.Begin(7).status();
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(third.message()), ::testing::HasSubstr("2 large answers"));
  EXPECT_TRUE(calls.Begin(9).ok());
}

}  // namespace
}  // namespace superoffload::rpc
