#include "server/checkpoint/index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
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
          .seed = uint64_t{1} << 63,
          .groups = {{{"lr", 0.1}, {"eps", 1e-9}}, {{"lr", 3e-4}}},
          .parameter_groups = {{"w", 1}, {"b", 0}},
          .parameter_steps = {{"b", 7}},
          .shards = {{"w", {{8, 4}, {2, 0}}}},
          .blocks = {{"exp_avg", {"exp_avg_scale", 256}}},
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
  ASSERT_EQ(parsed->blocks.size(), 1u);
  EXPECT_EQ(parsed->blocks.at("exp_avg").scales, "exp_avg_scale");
  EXPECT_EQ(parsed->blocks.at("exp_avg").elements, 256u);
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

// As releases before wrote it: nothing sums it up, so each number is in its range or refused.
std::string OlderIndex(const std::string& from = "", const std::string& to = "") {
  const std::string text =
      R"({"metadata": {"format": "superoffload", "version": 2, "optimizer": "o", "algorithm": "adamw", "run_name": "r",
          "rank": 1, "ranks": 4, "lineage": 8, "run": 9, "seed": 6, "sequence": 5, "step": 12, "committed_steps": 10,
          "total_size": 4096}, "groups": [{"beta1": 0.9, "beta2": 0.999, "eps": 1e-9, "lr": 0.1, "weight_decay": 0.5}],
          "parameter_groups": {"w": 0}, "parameter_steps": {"w": 7},
          "shards": {"w": {"global_shape": [8, 4], "global_offset": [2, 0]}},
          "crc32": {"a.safetensors": 6}, "weight_map": {"model.w": "a.safetensors"}})";
  return from.empty() ? text : absl::StrReplaceAll(text, {{from, to}});
}

struct Edit {
  const char* from;
  const char* to;
  absl::StatusCode code;
  const char* message;
};

class EditedIndexTest : public ::testing::TestWithParam<Edit> {};

TEST_P(EditedIndexTest, IsRefusedWithASentence) {
  const std::string text = OlderIndex();
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
                      Edit{"\"w\": 0", "\"w\": 1", kLost, "group of parameter \"w\""},
                      Edit{"\"model.w\": \"", "\"model.w\": \"../", kLost, "no file name"},
                      Edit{"\"a.safetensors\": 6", "\"a.safetensors\": -3", kLost, "CRC-32"}));

// What is restored from an index, and what it is found and removed by.
auto WholeOf(const Index& i) {
  std::map<std::string, std::pair<std::vector<uint64_t>, std::vector<uint64_t>>> shards;
  for (const auto& [name, place] : i.shards) shards[name] = {place.global_shape, place.global_offset};
  return std::tuple(i.optimizer, i.algorithm, i.run_name, i.rank, i.ranks, i.lineage, i.run, i.seed, i.sequence, i.step,
                    i.committed_steps, i.groups, i.parameter_groups, i.parameter_steps, shards, i.tensor_files,
                    i.file_crc32, i.total_bytes);
}

TEST(IndexTest, NoChangeOfAByteGoesUnnoticed) {
  const Index index = Sample();
  const std::string text = EncodeIndex(index);
  int accepted = 0;
  const auto expect_same_or_refused = [&](const std::string& changed, const std::string& what) {
    const absl::StatusOr<Index> parsed = ParseIndex(changed);
    accepted += parsed.ok();
    if (parsed.ok()) {
      EXPECT_EQ(WholeOf(*parsed), WholeOf(index)) << what;
    } else {
      EXPECT_FALSE(parsed.status().message().empty());
    }
  };
  for (size_t at = 0; at < text.size(); ++at) {
    const std::string place = absl::StrCat("byte ", at, " of ", text.substr(at / 20 * 20, 40));
    for (const char c : std::string("0123456789abcdef-.,:{}[]\" \n") + '\0') {
      std::string changed = text;
      changed[at] = c;
      if (c != text[at]) expect_same_or_refused(changed, absl::StrCat(place, " becomes ", std::string(1, c)));
      expect_same_or_refused(text.substr(0, at) + c + text.substr(at),
                             absl::StrCat(std::string(1, c), " is put before ", place));
    }
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = text;
      changed[at] = static_cast<char>(changed[at] ^ 1 << bit);
      expect_same_or_refused(changed, absl::StrCat(place, ", bit ", bit));
    }
    expect_same_or_refused(text.substr(0, at), absl::StrCat("cut off at ", place));
    expect_same_or_refused(text.substr(0, at) + text.substr(at + 1), absl::StrCat("without ", place));
  }
  EXPECT_EQ(accepted, 0);
}

TEST(IndexTest, ADamagedOneIsSaidToBe) {
  const std::string text = absl::StrReplaceAll(EncodeIndex(Sample()), {{"\"lr\": 0.1", "\"lr\": 0.7"}});
  const absl::Status status = ParseIndex(text).status();
  EXPECT_EQ(status.code(), kLost);
  EXPECT_THAT(std::string(status.message()), HasSubstr("CRC-32"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("restore an earlier checkpoint"));
}

TEST(IndexTest, OlderOnesAreReadWithinBounds) {
  const absl::StatusOr<Index> older = ParseIndex(OlderIndex());
  ASSERT_TRUE(older.ok()) << older.status();
  EXPECT_EQ(older->committed_steps, 10u);
  EXPECT_EQ(older->groups[0].at("weight_decay"), 0.5);
  const std::pair<const char*, const char*> edits[] = {
      {"\"step\": 12", "\"step\": 9"},  // less than were committed
      {"\"step\": 12", "\"step\": 18446744073709551615"},
      {"\"step\": 12, \"committed_steps\": 10",
       "\"step\": 9223372036854775807, \"committed_steps\": 9223372036854775807"},
      {"\"committed_steps\": 10", "\"committed_steps\": 1.5"},
      {"\"committed_steps\": 10", "\"committed_steps\": -1"},
      {"\"committed_steps\": 10", "\"committed_steps\": \"10\""},
      {"\"committed_steps\": 10,", ""},
      {"\"rank\": 1", "\"rank\": 4"},
      {"\"rank\": 1", "\"rank\": 4294967297"},
      {"\"ranks\": 4", "\"ranks\": 4294967300"},
      {"\"ranks\": 4", "\"ranks\": 0"},
      {"\"sequence\": 5", "\"sequence\": 18446744073709551615"},
      {"\"lineage\": 8", "\"lineage\": []"},
      {"\"seed\": 6", "\"seed\": -6"},
      {"\"seed\": 6", "\"seed\": \"6\""},
      {"\"seed\": 6", "\"seed\": 18446744073709551616"},
      {"\"run_name\": \"r\"", "\"run_name\": 7"},
      {"\"total_size\": 4096", "\"total_size\": 18446744073709551615"},
      {"\"lr\": 0.1", "\"lr\": -0.1"},
      {"\"lr\": 0.1", "\"lr\": \"0.1\""},
      {"\"beta1\": 0.9", "\"beta1\": 1"},
      {"\"eps\": 1e-9", "\"eps\": null"},
      {"\"parameter_steps\": {\"w\": 7}", "\"parameter_steps\": [7]"},
      {"{\"beta1\"", "7, {\"beta1\""},
      {"\"global_offset\": [2, 0]", "\"global_offset\": [2]"},
      {"[8, 4]", "[8, 18446744073709551615]"},
  };
  for (const auto& [from, to] : edits) {
    ASSERT_NE(OlderIndex(from, to), OlderIndex()) << from;
    const absl::Status status = ParseIndex(OlderIndex(from, to)).status();
    EXPECT_EQ(status.code(), kLost) << from << " becomes " << to << ": " << status;
  }
}

}  // namespace
}  // namespace superoffload::checkpoint
