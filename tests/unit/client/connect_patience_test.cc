#include "client/src/connect_patience.h"

#include <gtest/gtest.h>

namespace superoffload::client {
namespace {

using std::chrono::milliseconds;

TEST(ConnectPatienceTest, IsWhatTheEnvironmentSaysOrHalfAMinute) {
  const auto with = [](const char* text) {
    ::setenv("SUPEROFFLOAD_CONNECT_SECONDS", text, 1);
    return ConnectPatience();
  };
  EXPECT_EQ(with("2.5"), milliseconds(2500));
  EXPECT_EQ(with("86400"), milliseconds(86'400'000));
  EXPECT_EQ(with("0"), milliseconds(1)) << "at once, and not for ever";
  for (const char* wrong : {"", "soon", "3 s", "-1", "86401", "nan"}) {
    EXPECT_EQ(with(wrong), milliseconds(30'000)) << wrong;
  }
  ::unsetenv("SUPEROFFLOAD_CONNECT_SECONDS");
  EXPECT_EQ(ConnectPatience(), milliseconds(30'000));
}

}  // namespace
}  // namespace superoffload::client
