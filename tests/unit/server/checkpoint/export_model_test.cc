// Exports of checkpoints whose tensors are large, or whose names are odd.
#include "server/checkpoint/export_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/files.h"
#include "server/checkpoint/index.h"
#include "server/checkpoint/inspect.h"
#include "server/checkpoint/safetensors.h"

namespace superoffload::checkpoint {
namespace {

using ::testing::HasSubstr;

class ExportModelTest : public ::testing::Test {
 protected:
  ~ExportModelTest() override { std::filesystem::remove_all(root_); }

  // A checkpoint of parameters of shape [4, 3, 5], each element another.
  void Save(const std::vector<std::string>& parameters) {
    Index index;
    index.groups.emplace_back();
    SafetensorsHeader header;
    std::vector<float> data;
    for (const std::string& name : parameters) {
      header.tensors.push_back({"model." + name, "F32", {4, 3, 5}, 4 * data.size(), 4 * (data.size() + 60)});
      for (int i = 0; i < 60; ++i) data.push_back(static_cast<float>(data.size()));
      index.parameter_groups[name] = 0;
      index.tensor_files["model." + name] = "a.safetensors";
    }
    std::filesystem::create_directories(root_ + "/saved");
    std::ofstream(root_ + "/saved/a.safetensors", std::ios::binary)
        << EncodeSafetensorsHeader(header)
        << std::string_view(reinterpret_cast<const char*>(data.data()), 4 * data.size());
    std::ofstream(root_ + "/saved/" + kIndexFile) << EncodeIndex(index);
  }

  absl::Status Export(const std::string& to, const std::string& dtype, uint64_t piece_bytes) const {
    ExportOptions options;
    options.checkpoint = root_ + "/saved";
    options.target = root_ + "/" + to;
    options.dtype = dtype;
    options.piece_bytes = piece_bytes;
    return ExportModel(options).status();
  }

  const std::string root_ = [] {
    std::string path = ::testing::TempDir() + "/export-model-XXXXXX";
    return std::string(::mkdtemp(path.data()));
  }();
};

TEST_F(ExportModelTest, TensorsGoThroughMemoryInPiecesOfAnySize) {
  Save({"w", "v"});
  for (const char* const dtype : {"F32", "BF16"}) {
    const std::string whole = absl::StrCat("whole-", dtype);
    ASSERT_TRUE(Export(whole, dtype, 1 << 20).ok());
    for (const uint64_t piece_bytes : {1, 4, 8, 28, 100}) {
      const std::string to = absl::StrCat(dtype, piece_bytes);
      const absl::Status status = Export(to, dtype, piece_bytes);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(*ReadText(root_ + "/" + to + "/model.safetensors", 1 << 20),
                *ReadText(root_ + "/" + whole + "/model.safetensors", 1 << 20))
          << piece_bytes;
    }
  }
}

TEST_F(ExportModelTest, ParametersThatWouldBecomeOneTensorAreRefused) {
  Save({"w", "module.w"});
  const absl::Status status = Export("model", "F32", 1 << 20);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("two parameters"));
}

TEST_F(ExportModelTest, ANameThatNoTensorCanHaveIsRefused) {
  for (const char* const name : {"__metadata__", "module.__metadata__", "module."}) {
    Save({name, "w"});
    EXPECT_EQ(Export("model", "F32", 1 << 20).code(), absl::StatusCode::kFailedPrecondition) << name;
    EXPECT_FALSE(std::filesystem::exists(root_ + "/model"));
  }
}

TEST_F(ExportModelTest, ATensorThatItsFileLacksIsMissed) {
  Save({"w"});
  Index index = *ParseIndex(*ReadText(root_ + "/saved/" + kIndexFile, 1 << 20));
  index.tensor_files["exp_avg.w"] = "a.safetensors";
  std::ofstream(root_ + "/saved/" + kIndexFile) << EncodeIndex(index);
  const absl::StatusOr<Inspection> found = InspectCheckpoint(root_ + "/saved", false);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_FALSE(found->whole);
  EXPECT_THAT(found->text, HasSubstr("lacks tensor \"exp_avg.w\""));
  EXPECT_EQ(Export("model", "F32", 1 << 20).code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace superoffload::checkpoint
