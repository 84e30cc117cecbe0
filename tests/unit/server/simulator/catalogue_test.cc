#include "server/simulator/catalogue.h"

#include <gmock/gmock.h>

#include <set>

#include "server/engine/layout.h"

namespace superoffload::simulator {
namespace {

using ::testing::DoubleNear;
using ::testing::HasSubstr;

struct Known {
  const char* name;
  uint64_t parameters;  // the exact sum of the published architecture
};

constexpr Known kKnown[] = {{"llama-8b", 8030261248},     {"phi-4", 14659507200},         {"qwen3-14b", 14768307200},
                            {"gpt-oss-20b", 20914757184}, {"qwen3-30b-a3b", 30532122624}, {"seed-oss-36b", 36151104512},
                            {"llama-70b", 70553706496}};

TEST(CatalogueTest, ModelsHaveThePublishedNumberOfParameters) {
  for (const Known& known : kKnown) {
    const absl::StatusOr<Model> model = FindModel(known.name);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(ParameterCount(*model), known.parameters) << known.name;
  }
}

TEST(CatalogueTest, ThePapersShapesHaveTheirNominalSize) {
  for (const auto& [name, billions] : {std::pair{"gpt2-1b", 1.0},
                                       {"gpt2-2b", 2.0},
                                       {"gpt2-3b", 3.0},
                                       {"gpt2-5b", 5.0},
                                       {"gpt2-10b", 10.0},
                                       {"gpt2-15b", 15.0},
                                       {"gpt2-20b", 20.0},
                                       {"gpt2-25b", 25.0},
                                       {"gpt2-50b", 50.0},
                                       {"gpt2-80b", 80.0},
                                       {"gpt2-150b", 150.0},
                                       {"gpt2-200b", 200.0}}) {
    const absl::StatusOr<Model> model = FindModel(name);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_THAT(static_cast<double>(ParameterCount(*model)) / 1e9, DoubleNear(billions, 0.15 * billions)) << name;
  }
}

TEST(CatalogueTest, EveryModelIsOneThatTheDaemonCanPlanBlockByBlock) {
  for (const std::string& name : ModelNames()) {
    Model model = *FindModel(name);
    ASSERT_TRUE(Complete(model.architecture).ok()) << name;
    std::set<uint32_t> units;
    uint32_t last = 0;
    for (const engine::ParameterSpec& parameter : model.parameters) {
      EXPECT_GE(parameter.unit, last) << parameter.name;
      units.insert(last = parameter.unit);
    }
    EXPECT_EQ(units.size(), model.architecture.layers + 2) << name;
    engine::OptimizerSpec spec;
    spec.parameters = model.parameters;
    spec.groups = {spec.algorithm->DefaultScalars()};
    const absl::StatusOr<engine::Layout> layout = engine::PlanLayout(spec);
    ASSERT_TRUE(layout.ok()) << name << layout.status();
    EXPECT_GE(layout->state_elements(), ParameterCount(model));
  }
}

TEST(CatalogueTest, AnUnknownModelNamesThoseThereAre) {
  const absl::Status status = FindModel("llama-9b").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("gpt-oss-20b"));
}

}  // namespace
}  // namespace superoffload::simulator
