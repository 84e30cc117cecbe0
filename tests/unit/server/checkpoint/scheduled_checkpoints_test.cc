// What a schedule of a run removes of the parts that its ranks have left.
#include "server/checkpoint/scheduled_checkpoints.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "server/checkpoint/partial_directory.h"
#include "server/checkpoint/run_index.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

const RunMoment kSealed{"llama", 2, 0xabc, 20};

class ScheduledCheckpointsTest : public ::testing::Test {
 protected:
  ScheduledCheckpointsTest() {
    std::string name = (fs::temp_directory_path() / "so-scheduled-XXXXXX").string();
    directory_ = ::mkdtemp(name.data());
  }
  ~ScheduledCheckpointsTest() override { fs::remove_all(directory_); }

  std::string Seal() const {
    const std::string sealed = ScheduledRun(directory_, kSealed.committed_steps, kSealed.lineage);
    fs::create_directory(sealed);
    std::ofstream(fs::path(sealed) / kRunIndexFile) << EncodeRunIndex(
        {.moment = kSealed, .algorithm = "adamw", .run = 1, .sequence = 1, .total_bytes = 3, .index_crc32 = {4, 5}});
    return sealed;
  }

  // Where the parts of a run's checkpoint grow, with one that is half written.
  fs::path Grow(uint64_t committed_steps, uint64_t lineage) const {
    const fs::path target = ScheduledRun(directory_, committed_steps, lineage);
    const fs::path growing = directory_ / ("." + target.filename().string() + ".ranks");
    fs::create_directories(growing / ".rank-00000-of-00002.partial");
    return growing;
  }

  fs::path directory_;
};

TEST_F(ScheduledCheckpointsTest, PartsThatAKilledRankHadBegunGoOnceALaterCheckpointIsWhole) {
  const std::string sealed = Seal();
  const fs::path older = Grow(10, kSealed.lineage), next = Grow(30, kSealed.lineage), before_restore = Grow(40, 0xdef);
  PruneRuns(sealed, 1);
  EXPECT_FALSE(fs::exists(older));
  EXPECT_FALSE(fs::exists(before_restore));
  EXPECT_TRUE(fs::exists(next / ".rank-00000-of-00002.partial"));
  EXPECT_TRUE(fs::exists(sealed));
}

TEST_F(ScheduledCheckpointsTest, PartsThatAreBeingWrittenStay) {
  const std::string sealed = Seal();
  const fs::path growing = Grow(10, 0xdef);
  const auto part = PartialDirectory::Create(growing / PartName(1, 2));
  ASSERT_TRUE(part.ok()) << part.status();
  PruneRuns(sealed, 1);
  ASSERT_TRUE((*part)->Publish().ok());
  EXPECT_TRUE(fs::exists(growing / PartName(1, 2)));
  EXPECT_FALSE(fs::exists(growing / ".rank-00000-of-00002.partial"));
}

}  // namespace
}  // namespace superoffload::checkpoint
