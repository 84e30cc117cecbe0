#include "server/checkpoint/index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_replace.h"

namespace superoffload::checkpoint {
namespace {

using ::testing::HasSubstr;

Index Sample() {
  return {.optimizer = "run-17",
              .algorithm = "adamw",
              .run_name = "llama",
              .rank = 1,
              .ranks = 4,
              .step = 12,
              .committed_steps = 10,
              .groups = {{{"lr", 0.1}, {"eps", 1e-9}}, {{"lr", 3e-4}}},
              .parameter_groups = {{"w", 1}, {"b", 0}},
              .parameter_steps = {{"b", 7}},
              .shards = {{"w", {{8, 4}, {2, 0}}}},
              .tensor_files = {{"model.w", "model-1.safetensors"}, {"model.b", "model-1.safetensors"}},
              .file_crc32 = {{"model-1.safetensors", 0xfedcba98}},
              .total_bytes = 4096};
}

TEST(IndexTest, AnEncodedIndexIsReadBack) {
  const Index index = Sample();
  const absl::StatusOr<Index> parsed = ParseIndex(EncodeIndex(index));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->optimizer, index.optimizer);
  EXPECT_EQ(parsed->step, 12u);
  EXPECT_EQ(parsed->committed_steps, 10u);
  EXPECT_EQ(parsed->groups, index.groups);  // every bit of the doubles
  EXPECT_EQ(parsed->parameter_groups, index.parameter_groups);
  EXPECT_EQ(parsed->algorithm, "adamw");
  EXPECT_EQ(parsed->run_name, "llama");
  EXPECT_EQ(parsed->rank, 1u);
  EXPECT_EQ(parsed->ranks, 4u);
  EXPECT_EQ(parsed->parameter_steps, index.parameter_steps);
  EXPECT_EQ(parsed->shards.at("w").global_shape, index.shards.at("w").global_shape);
  EXPECT_EQ(parsed->shards.at("w").global_offset, index.shards.at("w").global_offset);
  EXPECT_EQ(parsed->tensor_files, index.tensor_files);
  EXPECT_EQ(parsed->file_crc32, index.file_crc32);
  EXPECT_EQ(parsed->total_bytes, 4096u);
}

TEST(IndexTest, TheVersionBeforeIsRead) {
  const absl::StatusOr<Index> parsed = ParseIndex(
      R"({"metadata": {"format": "superoffload", "version": 1, "optimizer": "o", "committed_steps": 3},
          "groups": [{"algorithm": "adamw", "lr": 0.5}], "parameter_groups": {"w": 0}, "crc32": {},
          "weight_map": {"model.w": "model-1.safetensors"}})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->groups, (std::vector<NamedScalars>{{{"lr", 0.5}}}));
  EXPECT_TRUE(parsed->parameter_steps.empty());
}

struct Edit {
  const char* from;
  const char* to;
  absl::StatusCode code;
  const char* message;
};

class EditedIndexTest : public ::testing::TestWithParam<Edit> {};

TEST_P(EditedIndexTest, IsRefusedWithASentence) {
  const std::string text = EncodeIndex(Sample());
  const std::string edited = absl::StrReplaceAll(text, {{GetParam().from, GetParam().to}});
  ASSERT_NE(text, edited);
  const absl::Status status = ParseIndex(edited).status();
  EXPECT_EQ(status.code(), GetParam().code);
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
}

constexpr absl::StatusCode kLost = absl::StatusCode::kDataLoss;
INSTANTIATE_TEST_SUITE_P(
    All, EditedIndexTest,
    ::testing::Values(Edit{"{", "", kLost, "no JSON object"}, Edit{"\"groups\"", "\"gruops\"", kLost, "\"groups\""},
                      Edit{"superoffload", "other", kLost, "another one"},
                      Edit{"\"version\": 2", "\"version\": 7", absl::StatusCode::kFailedPrecondition, "version 7"},
                      Edit{"\"w\": 1", "\"w\": 2", kLost, "group of parameter \"w\""},
                      Edit{"\"model.w\": \"", "\"model.w\": \"../", kLost, "no file name"},
                      Edit{"4275878552", "-3", kLost, "CRC-32"}));

}  // namespace
}  // namespace superoffload::checkpoint
