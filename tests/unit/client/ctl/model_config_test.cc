#include "client/ctl/model_config.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace superoffload::ctl {
namespace {

using ::testing::HasSubstr;

constexpr char kLlama[] = R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100})";

absl::StatusOr<v1::ModelDescription> Parse(const std::string& json) {
  return ParseModelConfig(json, "it", "", v1::DATA_TYPE_UNSPECIFIED);
}

std::string Refusal(const std::string& json) {
  const absl::Status status = Parse(json).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << json.substr(0, 200);
  EXPECT_TRUE(status.message().find('\n') == std::string::npos) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("it"));
  return std::string(status.message());
}

// The configuration with another value of a field that it has.
std::string With(const std::string& from, const std::string& to) {
  const std::string json = absl::StrReplaceAll(kLlama, {{from, to}});
  EXPECT_NE(json, kLlama) << from;
  return json;
}

TEST(ModelConfigTest, ParametersAreListedInOrderWithTheirBlocks) {
  const absl::StatusOr<v1::ModelDescription> model = Parse(kLlama);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->name(), "llama");
  ASSERT_EQ(model->parameters_size(), 1 + 2 * 9 + 2);
  EXPECT_EQ(model->parameters(0).unit(), 0u);
  EXPECT_EQ(model->parameters(2).name(), "model.layers.0.self_attn.k_proj.weight");
  EXPECT_EQ(model->parameters(2).shape(0), 32u);
  EXPECT_EQ(model->parameters(2).unit(), 1u);
  EXPECT_EQ(model->parameters(20).name(), "lm_head.weight");
  EXPECT_EQ(model->parameters(20).unit(), 3u);
  EXPECT_EQ(model->parameters(20).dtype(), v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(model->architecture().head_dimension(), 16u);
}

TEST(ModelConfigTest, TheDTypeIsTheOneAskedForElseTheConfigurations) {
  const std::string json = With("\"vocab_size\": 100", "\"vocab_size\": 100, \"torch_dtype\": \"float16\"");
  EXPECT_EQ(Parse(json)->parameters(0).dtype(), v1::DATA_TYPE_FLOAT16);
  EXPECT_EQ(ParseModelConfig(json, "it", "", v1::DATA_TYPE_FLOAT32)->parameters(0).dtype(), v1::DATA_TYPE_FLOAT32);
  EXPECT_THAT(Refusal(absl::StrReplaceAll(json, {{"float16", "int4"}})), HasSubstr("torch_dtype is \"int4\""));
}

TEST(ModelConfigTest, NumbersOutOfRangeAreNamedWithTheirRange) {
  EXPECT_THAT(Refusal(With("\"hidden_size\": 64", "\"hidden_size\": 0")),
              HasSubstr("hidden_size is 0 but must be a whole number from 1 to 1048576"));
  EXPECT_THAT(Refusal(With("\"hidden_size\": 64", "\"hidden_size\": -64")), HasSubstr("hidden_size is -64"));
  EXPECT_THAT(Refusal(With("\"hidden_size\": 64", "\"hidden_size\": 64.5")), HasSubstr("hidden_size is 64.5"));
  EXPECT_THAT(Refusal(With("\"hidden_size\": 64", "\"hidden_size\": 1e300")), HasSubstr("hidden_size is 1e+300"));
  EXPECT_THAT(Refusal(With("\"hidden_size\": 64", "\"hidden_size\": 1e999")), HasSubstr("JSON"));
  EXPECT_THAT(Refusal(With("\"hidden_size\": 64", "\"hidden_size\": \"64\"")), HasSubstr("hidden_size is no number"));
  EXPECT_THAT(Refusal(With("\"hidden_size\": 64", "\"hidden_size\": [64]")), HasSubstr("hidden_size is no number"));
  EXPECT_THAT(Refusal(With("_layers\": 2", "_layers\": 16385")), HasSubstr("num_hidden_layers is 16385 but must be"));
  EXPECT_THAT(Refusal(With("_heads\": 4", "_heads\": 5")), HasSubstr("multiple"));
  EXPECT_THAT(Refusal(With("_value_heads\": 2", "_value_heads\": 3")), HasSubstr("multiple"));
  EXPECT_THAT(Refusal(With("\"vocab_size\": 100", "\"vocab_size\": 100, \"mlp_bias\": 1")), HasSubstr("mlp_bias"));
}

TEST(ModelConfigTest, SizesMustBeStated) {
  for (const char* name :
       {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}) {
    EXPECT_THAT(Refusal(With(absl::StrCat("\"", name, "\""), "\"other\"")),
                HasSubstr(absl::StrCat(name, " is not stated")));
  }
  EXPECT_THAT(Refusal(With("model_type", "other")), HasSubstr("does not say model_type"));
}

TEST(ModelConfigTest, AnArchitectureThatIsNotKnownNamesThePlannerThatMayKnowIt) {
  const std::string refusal = Refusal(With("\"llama\"", "\"gemma3\""));
  EXPECT_THAT(refusal, HasSubstr("\"gemma3\", which superoffloadctl does not know"));
  EXPECT_THAT(refusal, HasSubstr("`superoffload plan`"));
  EXPECT_LT(Refusal(With("\"llama\"", absl::StrCat("\"", std::string(100000, 'x'), "\""))).size(), 1000u);
}

TEST(ModelConfigTest, ListsMustFitTheirLayers) {
  const std::string qwen = absl::StrReplaceAll(
      kLlama,
      {{"\"llama\"", "\"qwen2\", \"use_sliding_window\": true, \"sliding_window\": 8, \"layer_types\": [LIST]"}});
  const auto with = [&](const std::string& list) { return absl::StrReplaceAll(qwen, {{"LIST", list}}); };
  EXPECT_EQ(Parse(with("\"full_attention\", \"sliding_attention\""))->architecture().windowed_layers(), 1u);
  EXPECT_THAT(Refusal(with("\"full_attention\"")), HasSubstr("layer_types has 1 entries for 2 layers"));
  EXPECT_THAT(Refusal(with("1, 2")), HasSubstr("layer_types must be a list of texts"));
}

TEST(ModelConfigTest, WhatIsNoJsonObjectIsRefused) {
  for (const char* json :
       {"", "{", "[]", "null", "7", "{\"model_type\": }", "{\"model_type\": 7}", "\xff\xfe", "{{{{"}) {
    Refusal(json);
  }
  for (const size_t depth : {60, 101, 100000}) {
    std::string nested = kLlama;
    nested.insert(1, absl::StrCat("\"deep\": ", std::string(depth, '['), std::string(depth, ']'), ", "));
    EXPECT_THAT(Refusal(nested), HasSubstr("levels"));
    std::string objects;
    for (size_t i = 0; i < depth; ++i) objects += "{\"a\":";
    Refusal(objects);
  }
}

TEST(ModelConfigTest, HugeFilesAreRefusedAndFilesWithoutEndNotRead) {
  EXPECT_THAT(Refusal(std::string(kMostConfigBytes + 1, ' ')), HasSubstr("more than 1048576 bytes"));
  for (const char* path : {"/dev/zero", "/dev", "/nowhere/at/all"}) {
    EXPECT_THAT(std::string(ReadModelConfig(path, v1::DATA_TYPE_UNSPECIFIED).status().message()),
                HasSubstr("there is no file"));
  }
}

TEST(ModelConfigTest, AModelIsNamedAfterItsDirectory) {
  const std::filesystem::path directory = std::filesystem::path(::testing::TempDir()) / "my-model";
  std::filesystem::create_directories(directory);
  std::ofstream(directory / "config.json") << kLlama;
  for (const std::string& path : {directory.string(), directory.string() + "/", (directory / "config.json").string()}) {
    const absl::StatusOr<v1::ModelDescription> model = ReadModelConfig(path, v1::DATA_TYPE_UNSPECIFIED);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(model->name(), "my-model") << path;
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace superoffload::ctl
