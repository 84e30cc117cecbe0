#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "server/memory/memory_budget.h"
#include "server/memory/shared_memory.h"

namespace superoffload::memory {
namespace {

using ::testing::HasSubstr;

TEST(SharedMemoryTest, IsZeroFilledAndSealed) {
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create("test", 10000);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_GE(memory->bytes(), 10000u);
  EXPECT_TRUE(
      std::all_of(memory->data(), memory->data() + memory->bytes(), [](std::byte b) { return b == std::byte{}; }));
  EXPECT_NE(::ftruncate(memory->fd(), 0), 0);
  EXPECT_NE(::ftruncate(memory->fd(), 1 << 20), 0);
  EXPECT_NE(::fcntl(memory->fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(SharedMemoryTest, AReadOnlyDescriptorCannotWriteButSeesWrites) {
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create("test", 4096);
  ASSERT_TRUE(memory.ok());
  absl::StatusOr<FileDescriptor> read_only = memory->OpenReadOnly();
  ASSERT_TRUE(read_only.ok()) << read_only.status();
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, read_only->get(), 0), MAP_FAILED);
  EXPECT_EQ(::pwrite(read_only->get(), "x", 1, 0), -1);
  void* view = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, read_only->get(), 0);
  ASSERT_NE(view, MAP_FAILED);
  memory->data()[7] = std::byte{42};
  EXPECT_EQ(static_cast<const std::byte*>(view)[7], std::byte{42});
  ::munmap(view, 4096);
}

TEST(SharedMemoryTest, AnImpossibleSizeIsResourceExhausted) {
  EXPECT_EQ(SharedMemory::Create("test", size_t{1} << 50).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(SharedMemoryTest, WhatTrainersWriteCanLoseItsPagesAndIsReadStill) {
  constexpr size_t kBytes = 4 << 20;
  Binding binding;
  binding.from_pool = false;
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create("test", kBytes, binding);
  ASSERT_TRUE(memory.ok()) << memory.status();
  struct statfs fs{};
  ASSERT_EQ(::fstatfs(memory->fd(), &fs), 0);
  EXPECT_NE(fs.f_type, HUGETLBFS_MAGIC);
  memory->data()[7] = std::byte{42};
  ASSERT_EQ(::fallocate(memory->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kBytes), 0);
  EXPECT_EQ(memory->data()[7], std::byte{});
}

TEST(MemoryBudgetTest, RefusesWithNumbersAndGivesBack) {
  MemoryBudget budget(100);
  {
    absl::StatusOr<MemoryReservation> first = budget.Reserve("first", 7, {.state_bytes = 60, .gradients_bytes = 10});
    ASSERT_TRUE(first.ok());
    const absl::StatusOr<MemoryReservation> second = budget.Reserve("second", 8, {.parameters_bytes = 31});
    EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(second.status().message()), HasSubstr("31"));
    EXPECT_THAT(std::string(second.status().message()), HasSubstr("30"));
    MemoryReservation moved = *std::move(first);
    EXPECT_EQ(budget.used().total_bytes(), 70u);
  }
  EXPECT_EQ(budget.used().total_bytes(), 0u);
}

TEST(MemoryBudgetTest, ChecksWithoutReserving) {
  MemoryBudget budget(100, /*per_user_bytes=*/80);
  EXPECT_TRUE(budget.Check("a", 1, {.state_bytes = 80}).ok());
  EXPECT_EQ(budget.used().total_bytes(), 0u);
  const absl::StatusOr<MemoryReservation> taken = budget.Reserve("a", 1, {.state_bytes = 60});
  EXPECT_EQ(budget.Check("b", 1, {.state_bytes = 30}).message(),
            budget.Reserve("b", 1, {.state_bytes = 30}).status().message());
  EXPECT_EQ(budget.Check("b", 2, {.state_bytes = 50}).code(), absl::StatusCode::kResourceExhausted);
}

TEST(MemoryBudgetTest, AUserHasAShare) {
  MemoryBudget budget(100, /*per_user_bytes=*/40);
  absl::StatusOr<MemoryReservation> first = budget.Reserve("first", 7, {.state_bytes = 30});
  ASSERT_TRUE(first.ok());
  const absl::StatusOr<MemoryReservation> second = budget.Reserve("second", 7, {.state_bytes = 11});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("per_user_memory_bytes"));
  EXPECT_TRUE(budget.Reserve("another user's", 8, {.state_bytes = 40}).ok());
  *first = MemoryReservation();
  EXPECT_TRUE(budget.Reserve("third", 7, {.state_bytes = 40}).ok());
}

}  // namespace
}  // namespace superoffload::memory
