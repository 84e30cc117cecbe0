#include "server/checkpoint/run_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/checkpoint/files.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

class RunDirectoryTest : public ::testing::Test {
 protected:
  RunDirectoryTest() : root_(fs::path(::testing::TempDir()) / absl::StrCat("run-directory-", ::getpid())) {
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  ~RunDirectoryTest() override { fs::remove_all(root_); }

  std::string target() const { return root_ / "run"; }

  void WritePart(uint32_t rank, const RunMoment& moment) {
    const fs::path part = fs::path(GrowingRun(target())) / PartName(rank, moment.ranks);
    fs::create_directories(part);
    Index index;
    index.run_name = moment.run_name;
    index.rank = rank;
    index.ranks = moment.ranks;
    index.lineage = moment.lineage;
    index.step = index.committed_steps = moment.committed_steps;
    index.run = 40 + rank;
    std::ofstream(part / kIndexFile) << EncodeIndex(index);
  }

  absl::StatusOr<Seal> TrySeal() {
    return SealRun(target(), moment_, [] { return 7; });
  }

  const fs::path root_;
  const RunMoment moment_{"llama", 3, 99, 10};
};

TEST_F(RunDirectoryTest, WhoeverComesLastSealsAndNothingHasTheNameBefore) {
  ASSERT_TRUE(BeginRun(target(), moment_).ok());
  for (uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(*TrySeal(), Seal::kPartsMissing);
    EXPECT_FALSE(fs::exists(target()));
    EXPECT_EQ(OpenCheckpoint(target()).status().code(), absl::StatusCode::kNotFound);
    EXPECT_FALSE(HasPart(target(), moment_, rank));
    WritePart(rank, moment_);
    EXPECT_TRUE(HasPart(target(), moment_, rank));
  }
  EXPECT_EQ(*TrySeal(), Seal::kSealed);
  EXPECT_EQ(*TrySeal(), Seal::kWasSealed);
  const absl::StatusOr<Checkpoint> checkpoint = OpenCheckpoint(target());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->run->moment, moment_);
  EXPECT_EQ(checkpoint->run->sequence, 7u);
  EXPECT_EQ(checkpoint->run->run, 40u) << "rank 0's";
  EXPECT_EQ(checkpoint->parts.size(), 3u);
  EXPECT_FALSE(fs::exists(GrowingRun(target())));
  EXPECT_TRUE(HasPart(target(), moment_, 0));
}

TEST_F(RunDirectoryTest, PartsOfAnotherMomentAreNotTakenForThoseOfThisOne) {
  ASSERT_TRUE(BeginRun(target(), moment_).ok());
  for (const RunMoment& other :
       {RunMoment{"llama", 3, 98, 10}, RunMoment{"llama", 3, 99, 9}, RunMoment{"bert", 3, 99, 10}}) {
    for (uint32_t rank = 0; rank < 3; ++rank) WritePart(rank, rank == 1 ? other : moment_);
    EXPECT_EQ(*TrySeal(), Seal::kPartsMissing);
    EXPECT_FALSE(HasPart(target(), moment_, 1)) << "and it is removed";
    EXPECT_FALSE(fs::exists(fs::path(GrowingRun(target())) / PartName(1, 3)));
  }
}

TEST_F(RunDirectoryTest, OfRanksThatSealAtOnceAllFindItWhole) {
  ASSERT_TRUE(BeginRun(target(), moment_).ok());
  for (uint32_t rank = 0; rank < 3; ++rank) WritePart(rank, moment_);
  std::vector<absl::StatusOr<Seal>> seals(4, Seal::kPartsMissing);
  std::vector<std::thread> ranks;
  for (absl::StatusOr<Seal>& seal : seals) ranks.emplace_back([&] { seal = TrySeal(); });
  for (std::thread& rank : ranks) rank.join();
  int sealed = 0;
  for (const absl::StatusOr<Seal>& seal : seals) {
    ASSERT_TRUE(seal.ok()) << seal.status();
    EXPECT_NE(*seal, Seal::kPartsMissing);
    sealed += *seal == Seal::kSealed;
  }
  EXPECT_EQ(sealed, 1);
  EXPECT_TRUE(OpenCheckpoint(target()).ok());
}

TEST_F(RunDirectoryTest, ADamagedOrMissingPartIsDataLoss) {
  ASSERT_TRUE(BeginRun(target(), moment_).ok());
  for (uint32_t rank = 0; rank < 3; ++rank) WritePart(rank, moment_);
  ASSERT_EQ(*TrySeal(), Seal::kSealed);
  const fs::path index = fs::path(target()) / PartName(1, 3) / kIndexFile;
  const std::string text = *ReadText(index, kMaxIndexBytes);
  std::ofstream(index) << absl::StrReplaceAll(text, {{"\"run\": 41", "\"run\": 42"}});
  EXPECT_EQ(OpenCheckpoint(target()).status().code(), absl::StatusCode::kDataLoss);
  fs::remove(index);
  EXPECT_EQ(OpenCheckpoint(target()).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(RunDirectoryTest, AnotherCheckpointsNameIsRefused) {
  fs::create_directories(target());
  EXPECT_EQ(BeginRun(target(), moment_).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(BeginRun("here", moment_).code(), absl::StatusCode::kInvalidArgument);
}

struct RunIndexEdit {
  const char* from;
  const char* to;
  absl::StatusCode code;
};

class EditedRunIndexTest : public ::testing::TestWithParam<RunIndexEdit> {};

TEST_P(EditedRunIndexTest, IsRefused) {
  std::string text = EncodeRunIndex({.moment = {"llama", 2, 99, 10},
                                     .algorithm = "adamw",
                                     .run = 1,
                                     .sequence = 2,
                                     .total_bytes = 3,
                                     .index_crc32 = {4, 5}});
  text =
      absl::StrReplaceAll(text.substr(0, text.find(",\n \"text_crc32")) + "}", {{"\"version\": 2", "\"version\": 1"}});
  ASSERT_TRUE(ParseRunIndex(text).ok());
  const std::string edited = absl::StrReplaceAll(text, {{GetParam().from, GetParam().to}});
  ASSERT_NE(text, edited);
  EXPECT_EQ(ParseRunIndex(edited).status().code(), GetParam().code);
}

constexpr absl::StatusCode kRunLost = absl::StatusCode::kDataLoss;
INSTANTIATE_TEST_SUITE_P(
    All, EditedRunIndexTest,
    ::testing::Values(RunIndexEdit{"{", "", kRunLost}, RunIndexEdit{"\"parts\"", "\"prats\"", kRunLost},
                      RunIndexEdit{"superoffload run", "other", kRunLost},
                      RunIndexEdit{"\"version\": 1", "\"version\": 7", absl::StatusCode::kFailedPrecondition},
                      RunIndexEdit{"rank-00001", "../k-00001", kRunLost},
                      RunIndexEdit{"\"index_crc32\": 5", "\"index_crc32\": -5", kRunLost}));

TEST(RunIndexTest, NoChangeOfAByteGoesUnnoticed) {
  const std::string text = EncodeRunIndex({.moment = {"llama", 2, 99, 10},
                                           .algorithm = "adamw",
                                           .run = 1,
                                           .sequence = 2,
                                           .total_bytes = 3,
                                           .index_crc32 = {4, 5}});
  ASSERT_TRUE(ParseRunIndex(text).ok()) << ParseRunIndex(text).status();
  for (size_t at = 0; at < text.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = text;
      changed[at] = static_cast<char>(changed[at] ^ 1 << bit);
      EXPECT_FALSE(ParseRunIndex(changed).ok())
          << "byte " << at << ", bit " << bit << " of " << text.substr(at / 20 * 20, 40);
    }
  }
}

TEST(RunIndexTest, OlderOnesAreReadWithinBounds) {
  const std::string older =
      R"({"metadata": {"format": "superoffload run", "version": 1, "run_name": "llama", "lineage": 99,
          "committed_steps": 10, "algorithm": "adamw", "run": 1, "sequence": 2, "total_size": 3},
          "parts": [{"directory": "rank-00000-of-00001", "index_crc32": 4}]})";
  const absl::StatusOr<RunIndex> index = ParseRunIndex(older);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->moment, (RunMoment{"llama", 1, 99, 10}));
  for (const auto& [from, to] : {std::pair("_steps\": 10", "_steps\": 9223372036854775809"),
                                 {"_steps\": 10", "_steps\": -1"},
                                 {"\"sequence\": 2", "\"sequence\": 18446744073709551615"},
                                 {"\"lineage\": 99", "\"lineage\": \"99\""},
                                 {"\"run\": 1", "\"run\": 1e30"}}) {
    const std::string changed = absl::StrReplaceAll(older, {{from, to}});
    ASSERT_NE(changed, older);
    EXPECT_EQ(ParseRunIndex(changed).status().code(), absl::StatusCode::kDataLoss) << to;
  }
}

}  // namespace
}  // namespace superoffload::checkpoint
