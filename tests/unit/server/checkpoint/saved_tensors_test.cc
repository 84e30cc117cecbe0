#include "server/checkpoint/saved_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/safetensors.h"

namespace superoffload::checkpoint {
namespace {

using ::testing::HasSubstr;

// Tensor "model.w" of shape [5, 6], element (i, j) being 6 i + j, in boxes as ranks save them.
class SavedTensorsTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kRows = 5, kColumns = 6;

  Part Save(const Box& box, const std::string& tensor = "model.w") {
    Part part{absl::StrCat(::testing::TempDir(), "saved-tensors-", ::testing::UnitTest::GetInstance()->random_seed(),
                           "-", ::testing::UnitTest::GetInstance()->current_test_info()->name(), "-", parts_++),
              {}};
    std::filesystem::create_directories(part.directory);
    std::vector<float> data;
    for (uint64_t i = 0; i < box.shape[0]; ++i) {
      for (uint64_t j = 0; j < box.shape[1]; ++j) {
        data.push_back(static_cast<float>((box.offset[0] + i) * kColumns + box.offset[1] + j));
      }
    }
    const std::string header =
        EncodeSafetensorsHeader({.tensors = {{tensor, "F32", box.shape, 0, 4 * data.size()}}, .metadata = {}});
    std::ofstream(part.directory + "/model-1.safetensors", std::ios::binary)
        << header << std::string_view(reinterpret_cast<const char*>(data.data()), 4 * data.size());
    part.index.tensor_files[tensor] = "model-1.safetensors";
    if (box.shape != box.global_shape) part.index.shards["w"] = {box.global_shape, box.offset};
    return part;
  }

  absl::Status Add(const std::vector<uint64_t>& offset, const std::vector<uint64_t>& shape) {
    return saved_.AddPart(Save({{kRows, kColumns}, offset, shape}));
  }

  // Whether a box that is read has its elements.
  void ExpectReads(const std::vector<uint64_t>& offset, const std::vector<uint64_t>& shape) {
    const absl::StatusOr<SavedTensors::Tensor> tensor =
        saved_.Find("model.w", "F32", {{kRows, kColumns}, offset, shape});
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    std::vector<float> data(shape[0] * shape[1]);
    const absl::Status status = SavedTensors::Read(*tensor, reinterpret_cast<std::byte*>(data.data()));
    ASSERT_TRUE(status.ok()) << status;
    for (uint64_t i = 0; i < data.size(); ++i) {
      EXPECT_EQ(data[i], (offset[0] + i / shape[1]) * kColumns + offset[1] + i % shape[1]) << i;
    }
  }

  void ExpectEveryBoxReads() {
    for (uint64_t top = 0; top < kRows; ++top) {
      for (uint64_t left = 0; left < kColumns; ++left) {
        ExpectReads({top, left}, {kRows - top, kColumns - left});
        ExpectReads({0, left}, {top + 1, 1});
        ExpectReads({top, 0}, {1, left + 1});
      }
    }
  }

  SavedTensors saved_;
  int parts_ = 0;
};

TEST_F(SavedTensorsTest, AnyBoxIsReadFromUnevenRows) {
  for (const auto& [first, rows] : {std::pair<uint64_t, uint64_t>{0, 2}, {2, 2}, {4, 1}}) {
    ASSERT_TRUE(Add({first, 0}, {rows, kColumns}).ok());
  }
  ExpectEveryBoxReads();
}

TEST_F(SavedTensorsTest, AnyBoxIsReadFromTilesOfTwoDimensionsAndReplicas) {
  for (const uint64_t top : {0, 2}) {
    for (const uint64_t left : {0, 4}) {
      for (int replica = 0; replica < 2; ++replica) {
        ASSERT_TRUE(Add({top, left}, {top == 0 ? 2u : 3u, left == 0 ? 4u : 2u}).ok());
      }
    }
  }
  ExpectEveryBoxReads();
}

TEST_F(SavedTensorsTest, AnyBoxIsReadFromAWholeTensor) {
  ASSERT_TRUE(Add({0, 0}, {kRows, kColumns}).ok());
  ExpectEveryBoxReads();
}

TEST_F(SavedTensorsTest, MissingOverlappingAndForeignShardsAreRefused) {
  ASSERT_TRUE(Add({0, 0}, {2, kColumns}).ok());
  ExpectReads({0, 0}, {2, kColumns});
  const auto status = [this](const std::string& dtype, std::vector<uint64_t> shape) {
    return saved_.Find("model.w", dtype, Box::Whole(shape)).status();
  };
  EXPECT_EQ(status("F32", {kRows, kColumns}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status("F32", {kRows, kColumns}).message()), HasSubstr("lacks 18 elements"));
  EXPECT_THAT(std::string(status("F32", {kRows, 7}).message()), HasSubstr("[5, 6] in the checkpoint"));
  EXPECT_THAT(std::string(status("F16", {kRows, kColumns}).message()), HasSubstr("F32 [5, 6]"));
  ASSERT_TRUE(Add({1, 0}, {4, kColumns}).ok());
  EXPECT_EQ(status("F32", {kRows, kColumns}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Add({4, 0}, {2, kColumns}).code(), absl::StatusCode::kDataLoss) << "it ends below the tensor";
  EXPECT_EQ(Add({~uint64_t{0}, 0}, {2, kColumns}).code(), absl::StatusCode::kDataLoss);
}

TEST_F(SavedTensorsTest, ShapesWhoseProductWrapsAreDamage) {
  const uint64_t half = uint64_t{1} << 32;
  EXPECT_EQ(saved_.AddPart(Save({{half, half}, {0, 0}, {1, 1}})).code(), absl::StatusCode::kDataLoss)
      << "no element would be missing";
  EXPECT_EQ(saved_.AddPart(Save({{half / 4, half}, {0, 0}, {1, 1}})).code(), absl::StatusCode::kDataLoss)
      << "no byte of fp32 would be missing";
  EXPECT_EQ(saved_.AddPart(Save({{half / 16, half}, {0, 0}, {1, 1}})).code(), absl::StatusCode::kOk);
}

size_t OpenDescriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

TEST_F(SavedTensorsTest, HoweverManyFilesThereAreFewAreOpen) {
  const size_t before = OpenDescriptors();
  for (uint64_t i = 0; i < kRows; ++i) {
    for (uint64_t j = 0; j < kColumns; ++j) ASSERT_TRUE(Add({i, j}, {1, 1}).ok());
  }
  EXPECT_LE(OpenDescriptors(), before + 16);
  ExpectReads({0, 0}, {kRows, kColumns});
  EXPECT_LE(OpenDescriptors(), before + 16);
}

TEST_F(SavedTensorsTest, AFileThatIsReplacedMeanwhileIsFound) {
  const Part part = Save({{kRows, kColumns}, {0, 0}, {kRows, kColumns}});
  ASSERT_TRUE(saved_.AddPart(part).ok());
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(saved_.AddPart(Save({{7, 7}, {0, 0}, {7, 7}}, "model.v")).ok());
  const std::string path = part.directory + "/model-1.safetensors";
  std::filesystem::copy_file(path, path + ".new");
  std::filesystem::rename(path + ".new", path);
  const auto tensor = saved_.Find("model.w", "F32", Box::Whole({kRows, kColumns}));
  ASSERT_TRUE(tensor.ok());
  std::vector<float> data(kRows * kColumns);
  const absl::Status read = SavedTensors::Read(*tensor, reinterpret_cast<std::byte*>(data.data()));
  EXPECT_EQ(read.code(), absl::StatusCode::kDataLoss) << read;
  EXPECT_THAT(std::string(read.message()), HasSubstr("was replaced while it was read"));
}

// It may have become another one between the two.
TEST_F(SavedTensorsTest, AFileThatIsNamedTwiceIsReadEachTime) {
  const std::string path = Save({{kRows, kColumns}, {0, 0}, {kRows, kColumns}}).directory + "/model-1.safetensors";
  ASSERT_TRUE(saved_.AddFile(path, 3).ok());
  const std::string other = Save({{7, 7}, {0, 0}, {7, 7}}, "model.v").directory + "/model-1.safetensors";
  std::filesystem::rename(other, path);
  ASSERT_TRUE(saved_.AddFile(path, 3).ok());
  ASSERT_EQ(saved_.slices().size(), 2u);
  for (const auto& [name, slices] : saved_.slices()) {
    EXPECT_EQ(slices.front().file->file.path(), path) << name;
  }
}

}  // namespace
}  // namespace superoffload::checkpoint
