// What appears whole or not at all, and what killed daemons leave of it.
#include "server/checkpoint/partial_directory.h"

#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "server/checkpoint/files.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

class PartialDirectoryTest : public ::testing::Test {
 protected:
  PartialDirectoryTest() {
    std::string name = (fs::temp_directory_path() / "so-partial-XXXXXX").string();
    directory_ = ::mkdtemp(name.data());
  }
  ~PartialDirectoryTest() override { fs::remove_all(directory_); }

  void Leave(const std::string& name) const {
    fs::create_directories(directory_ / name);
    std::ofstream(directory_ / name / "optimizer.safetensors") << "half of it";
  }
  bool Exists(const std::string& name) const { return fs::exists(fs::symlink_status(directory_ / name)); }

  fs::path directory_;
};

TEST_F(PartialDirectoryTest, IsThereOnceItIsPublishedAndNotAtAllOtherwise) {
  {
    const auto dropped = PartialDirectory::Create(directory_ / "a");
    ASSERT_TRUE(dropped.ok()) << dropped.status();
    EXPECT_TRUE(Exists(".a.partial"));
  }
  EXPECT_TRUE(fs::is_empty(directory_));
  const auto published = PartialDirectory::Create(directory_ / "a");
  ASSERT_TRUE(published.ok()) << published.status();
  std::ofstream(**published / "file") << "all of it";
  ASSERT_TRUE((*published)->Publish().ok());
  EXPECT_TRUE(Exists("a/file"));
  EXPECT_FALSE(Exists(".a.partial"));
  EXPECT_EQ(PartialDirectory::Create(directory_ / "a").status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(PartialDirectoryTest, NobodyElseReadsWhatIsNotWholeYet) {
  const auto mode = [this](const std::string& name) {
    return static_cast<unsigned>(fs::status(directory_ / name).permissions());
  };
  const mode_t before = ::umask(0);
  for (const mode_t umask : {0u, 022u, 027u, 077u}) {
    ::umask(0);
    Leave(".a.partial");  // a killed daemon's, that anybody reads
    ::umask(umask);
    const auto directory = PartialDirectory::Create(directory_ / "a");
    ASSERT_TRUE(directory.ok()) << directory.status();
    const auto file = File::Create(**directory / "model.safetensors", 5);
    ASSERT_TRUE(file.ok() && file->WriteAt(0, "half", 4).ok());
    EXPECT_EQ(mode(".a.partial"), 0700u);
    EXPECT_EQ(mode(".a.partial/model.safetensors"), 0600u);
    ASSERT_TRUE((*directory)->Publish().ok());
    EXPECT_EQ(mode("a"), 0755u & ~umask);
    EXPECT_EQ(mode("a/model.safetensors"), 0644u & ~umask);
    EXPECT_FALSE(Exists("a/optimizer.safetensors"));
    fs::remove_all(directory_ / "a");
  }
  ::umask(before);
}

TEST_F(PartialDirectoryTest, WhatNobodyWritesIsRemovedWhereItIsOursAndNothingElse) {
  for (const char* const name : {".a.partial", ".notes.partial", "a.partial", ".a"}) Leave(name);
  fs::create_directories(directory_ / "archive");
  Leave("archive/kept");
  fs::create_directory_symlink(directory_ / "archive", directory_ / ".link.partial");
  const auto written = PartialDirectory::Create(directory_ / "b");
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(PartialDirectory::Create(directory_ / "b").status().code(), absl::StatusCode::kFailedPrecondition);
  RemoveLeftPartials(directory_, [](absl::string_view name) { return name != "notes"; });
  EXPECT_FALSE(Exists(".a.partial"));
  for (const char* const name : {".b.partial", ".notes.partial", "a.partial", ".a", ".link.partial", "archive/kept"}) {
    EXPECT_TRUE(Exists(name)) << name;
  }
  EXPECT_TRUE((*written)->Publish().ok());
}

TEST_F(PartialDirectoryTest, WhatAKilledDaemonHasLeftIsTakenOver) {
  Leave(".a.partial");
  const auto again = PartialDirectory::Create(directory_ / "a");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE(Exists(".a.partial/optimizer.safetensors"));
  EXPECT_TRUE((*again)->Publish().ok());
}

}  // namespace
}  // namespace superoffload::checkpoint
