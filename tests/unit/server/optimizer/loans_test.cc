#include "server/optimizer/loans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <utility>

namespace superoffload::optimizer {
namespace {

using ::testing::HasSubstr;

class LoansTest : public ::testing::Test {
 protected:
  memory::MemoryReservation Reserve(uint64_t bytes) {
    memory::MemoryUse use;
    use.lent_bytes = bytes;
    return *budget_.Reserve("a test", /*uid=*/1, use);
  }
  memory::MemoryBudget budget_{1 << 20};
};

TEST_F(LoansTest, WhatWasLentIsFoundByItsNumberUntilTheEnd) {
  memory::FileDescriptor kept;
  {
    Loans loans;
    ASSERT_EQ(*loans.Lend(Reserve(5000), {}), 1u);
    ASSERT_EQ(*loans.Count(Reserve(7000)), 2u);
    ASSERT_EQ(*loans.Lend(Reserve(100), {}), 3u);
    EXPECT_EQ(budget_.used().lent_bytes, 12100u);
    absl::StatusOr<transport::LentMemory> lent = loans.Find(1);
    ASSERT_TRUE(lent.ok()) << lent.status();
    EXPECT_GE(lent->bytes, 5000u);
    for (const uint64_t number : {0u, 2u, 4u}) {
      EXPECT_EQ(loans.Find(number).status().code(), absl::StatusCode::kNotFound) << number;
    }
    kept = std::move(lent->fd);
  }
  EXPECT_EQ(budget_.used().lent_bytes, 0u);
  void* const mapped = ::mmap(nullptr, 5000, PROT_READ | PROT_WRITE, MAP_SHARED, kept.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  static_cast<char*>(mapped)[4999] = 1;
  ::munmap(mapped, 5000);
}

TEST_F(LoansTest, ThereAreNotTooMany) {
  Loans loans;
  for (int i = 0; i < 1024; ++i) ASSERT_TRUE(loans.Count(Reserve(1)).ok());
  const absl::StatusOr<uint64_t> refused = loans.Count(Reserve(1));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status().message(), HasSubstr("ask for more at once"));
  EXPECT_EQ(budget_.used().lent_bytes, 1024u);
}

}  // namespace
}  // namespace superoffload::optimizer
