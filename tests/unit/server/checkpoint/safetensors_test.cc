#include "server/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace superoffload::checkpoint {
namespace {

using ::testing::HasSubstr;

TEST(SafetensorsTest, AnEncodedHeaderIsReadBack) {
  const SafetensorsHeader header{.tensors = {{"model.w", "F32", {2, 3}, 0, 24}, {"model.\"b\"\n", "F32", {}, 24, 28}},
                                 .metadata = {{"format", "pt"}}};
  const std::string encoded = EncodeSafetensorsHeader(header);
  EXPECT_EQ(encoded.size() % 8, 0u);
  const absl::StatusOr<uint64_t> length = ParseSafetensorsLength(encoded, encoded.size() + 28);
  ASSERT_TRUE(length.ok()) << length.status();
  ASSERT_EQ(*length, encoded.size() - 8);
  const absl::StatusOr<SafetensorsHeader> parsed = ParseSafetensorsHeader(encoded.substr(8), 28);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->metadata, header.metadata);
  ASSERT_EQ(parsed->tensors.size(), 2u);
  EXPECT_EQ(parsed->tensors[0].shape, (std::vector<uint64_t>{2, 3}));
  EXPECT_EQ(parsed->tensors[1].name, "model.\"b\"\n");
  EXPECT_EQ(parsed->tensors[1].begin, 24u);
}

TEST(SafetensorsTest, LengthsThatDoNotFitTheFileAreRefused) {
  const auto refused = [](const std::string& bytes, uint64_t file_bytes) {
    return ParseSafetensorsLength(bytes, file_bytes).status().code() == absl::StatusCode::kDataLoss;
  };
  EXPECT_TRUE(refused("short", 5));
  EXPECT_TRUE(refused(std::string("\x09\0\0\0\0\0\0\0", 8), 16));
  EXPECT_TRUE(refused(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8), 1 << 20));
  EXPECT_FALSE(refused(std::string("\x08\0\0\0\0\0\0\0", 8), 16));
}

struct BadHeader {
  const char* json;
  const char* message;
};

class BadHeaderTest : public ::testing::TestWithParam<BadHeader> {};

TEST_P(BadHeaderTest, IsDataLossThatSaysWhat) {
  const absl::Status status = ParseSafetensorsHeader(GetParam().json, 8).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    All, BadHeaderTest,
    ::testing::Values(
        BadHeader{"", "no JSON"}, BadHeader{"[]", "no JSON object"}, BadHeader{"{\"a\": 1}", "lacks dtype"},
        BadHeader{"{\"__metadata__\": 3}", "metadata"}, BadHeader{"{\"__metadata__\": {\"a\": 3}}", "is no string"},
        BadHeader{R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}})", "ill-formed"},
        BadHeader{R"({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}})", "ill-formed"},
        BadHeader{R"({"a": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}})", "unknown dtype"},
        BadHeader{R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}})", "do not fit its shape"},
        BadHeader{R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}})", "do not fit its shape"},
        BadHeader{R"({"a": {"dtype": "F32", "shape": [4611686018427387904, 2], "data_offsets": [0, 8]}})",
                  "do not fit its shape"},
        BadHeader{R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})", "hole"},
        BadHeader{R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})", "describes 4"}));

}  // namespace
}  // namespace superoffload::checkpoint
