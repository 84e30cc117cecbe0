#include "server/host/systemd_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <vector>

namespace superoffload::host {
namespace {

using ::testing::HasSubstr;

const std::vector<int> kFds = {0, 0, 0, 0, 0};  // nobody listens: they are only counted

TEST(SystemdStoreTest, MoreDescriptorsThanItKeepsAreRefused) {
  SystemdStore store({{"one", 5}}, 12);
  ASSERT_TRUE(store.Keep("two", kFds).ok());
  const absl::Status full = store.Keep("three", kFds);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(full.message(), HasSubstr("FileDescriptorStoreMax="));
  store.Drop("one");
  EXPECT_TRUE(store.Keep("three", kFds).ok());
}

TEST(SystemdStoreTest, NamesThatNoDaemonCouldBeStartedWithAreRefused) {
  const std::string name(140, 'x');
  const size_t room = 31 * static_cast<size_t>(::sysconf(_SC_PAGESIZE)) / (5 * 145);
  SystemdStore store({}, std::nullopt);
  size_t kept = 0;
  absl::Status status;
  while ((status = store.Keep(name + std::to_string(1000 + kept), kFds)).ok()) ++kept;
  EXPECT_EQ(kept, room);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("shorter names"));
  EXPECT_TRUE(store.Keep("x", kFds).ok());
}

}  // namespace
}  // namespace superoffload::host
