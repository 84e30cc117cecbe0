// A restore takes of its user's memory what the files make it take, and ends when nobody waits for it.
#include "server/checkpoint/read_scope.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/reader.h"
#include "server/checkpoint/run_directory.h"
#include "server/checkpoint/safetensors.h"
#include "server/checkpoint/saved_tensors.h"
#include "server/checkpoint/writer.h"
#include "tests/unit/server/optimizer/fake_house.h"

namespace superoffload::checkpoint {
namespace {

using optimizer::FakeHouse;
using ::testing::HasSubstr;

class ReadScopeTest : public ::testing::Test {
 protected:
  ReadScopeTest() {
    optimizer_ = *house_.Create(::geteuid(), "o");
    const engine::StepEngine::Moment moment{
        .statistics = {}, .groups = optimizer_->spec().groups, .parameter_steps = {0}};
    const absl::Status filled = optimizer_->Restore(Trainer(), moment, 5, [] { return absl::OkStatus(); });
    EXPECT_TRUE(filled.ok()) << filled;
    const std::atomic<bool> cancelled = false;
    Progress progress;
    const auto report =
        WriteCheckpoint(*optimizer_, {.directory = [this](uint64_t) { return path_; }}, cancelled, &progress);
    EXPECT_TRUE(report.status.ok()) << report.status;
  }
  ~ReadScopeTest() override { std::filesystem::remove_all(std::filesystem::path(path_).parent_path()); }

  optimizer::AttachedTrainer Trainer() { return {++epoch_, FakeHouse::User(::geteuid()), std::nullopt}; }

  absl::Status Restore(const ReadScope& scope) {
    return RestoreCheckpoint(*optimizer_, Trainer(), {.directories = {path_}}, scope).status();
  }

  // White space is JSON that takes nothing; but nobody knows before it is parsed.
  void Lengthen(const std::string& file, uint64_t bytes) const {
    std::ofstream(path_ + "/" + file, std::ios::app) << std::string(bytes, ' ');
  }

  std::string path_ = [] {
    std::string path = ::testing::TempDir() + "/read-scope-XXXXXX";
    return std::string(::mkdtemp(path.data())) + "/saved";
  }();
  static constexpr uint64_t kBudget = 64 << 20;
  FakeHouse house_{{}, kBudget};
  uint64_t epoch_ = 0;
  optimizer::OptimizerPtr optimizer_;
};

TEST_F(ReadScopeTest, ARestoreThatIsCancelledReadsNoMore) {
  int looks = 0, last = 0;
  ASSERT_TRUE(Restore(ReadScope::Of(*optimizer_, [&] { return ++looks < 0; })).ok());
  last = looks;
  EXPECT_GE(last, 4);  // the run's index, the index, each file, its checksum, and each tensor
  for (int at = 1; at <= last; ++at) {
    looks = 0;
    const absl::Status status = Restore(ReadScope::Of(*optimizer_, [&] { return ++looks >= at; }));
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << at << ": " << status;
    EXPECT_EQ(looks, at) << "it reads on";
  }
  EXPECT_TRUE(Restore(ReadScope::Of(*optimizer_)).ok());
}

TEST_F(ReadScopeTest, AnIndexIsNoLargerThanItsTensorsExplain) {
  Lengthen(kIndexFile, 1 << 20);
  const absl::Status whole = ReadIndex(path_).status();
  EXPECT_THAT(std::string(whole.message()), HasSubstr("CRC-32")) << "it may be so large: " << whole;
  Lengthen(kIndexFile, 1 << 20);
  const absl::Status status = ReadIndex(path_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("an index of what is beside it has at most 10")) << status;
  std::filesystem::resize_file(path_ + "/model-00001-of-00001.safetensors", 1 << 20);
  EXPECT_THAT(std::string(ReadIndex(path_).status().message()), HasSubstr("CRC-32"));
  EXPECT_THAT(std::string(ReadIndex(path_, ReadScope::OfOwn(*optimizer_)).status().message()), HasSubstr("at most 10"))
      << "the optimizer has written no such one";
}

TEST_F(ReadScopeTest, WhatIsParsedIsOfTheUsersMemory) {
  const uint64_t before = house_.budget.used().total_bytes();
  std::filesystem::resize_file(path_ + "/model-00001-of-00001.safetensors", 1 << 20);
  Lengthen(kIndexFile, 4 << 20);
  const absl::Status index = Restore(ReadScope::Of(*optimizer_));
  EXPECT_EQ(index.code(), absl::StatusCode::kResourceExhausted) << index;
  EXPECT_THAT(std::string(index.message()), HasSubstr("bytes are JSON"));
  const std::string file = path_ + "/long.safetensors";
  std::string header = EncodeSafetensorsHeader({.tensors = {}, .metadata = {{"long", std::string(4 << 20, 'x')}}});
  std::ofstream(file, std::ios::binary) << header;
  const absl::Status header_status =
      RestoreCheckpoint(*optimizer_, Trainer(), {.directories = {}, .files = {{file, 1}}}, ReadScope::Of(*optimizer_))
          .status();
  EXPECT_EQ(header_status.code(), absl::StatusCode::kResourceExhausted) << header_status;
  EXPECT_EQ(house_.budget.used().total_bytes(), before);
}

TEST_F(ReadScopeTest, WhatIsKeptOfFilesIsOfTheUsersMemoryUntilTheEnd) {
  const uint64_t before = house_.budget.used().total_bytes();
  SafetensorsHeader header;
  for (int i = 0; i < 3000; ++i) header.tensors.push_back({absl::StrCat("model.", i), "F32", {0}, 0, 0});
  const std::string file = path_ + "/many.safetensors";
  std::ofstream(file, std::ios::binary) << EncodeSafetensorsHeader(header);
  {
    SavedTensors saved(ReadScope::Of(*optimizer_));
    ASSERT_TRUE(saved.AddFile(file, 1).ok());
    EXPECT_GE(house_.budget.used().total_bytes(), before + 3000 * sizeof(SavedTensors::Slice));
    EXPECT_LT(house_.budget.used().total_bytes(), before + (2 << 20));
  }
  EXPECT_EQ(house_.budget.used().total_bytes(), before);
}

}  // namespace
}  // namespace superoffload::checkpoint
