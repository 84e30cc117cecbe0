// Whatever becomes of an index, a restore gives the state that was saved, or is refused and touches nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/checkpoint/reader.h"
#include "server/checkpoint/summed_json.h"
#include "server/checkpoint/writer.h"
#include "tests/unit/server/optimizer/fake_house.h"

namespace superoffload::checkpoint {
namespace {

using optimizer::FakeHouse;
using ::testing::HasSubstr;

class DamagedIndexTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kSteps = 7;

  DamagedIndexTest() {
    saved_ = Create("saved");
    Restore(*saved_, kSteps, 0.25f);
    const std::atomic<bool> cancelled = false;
    Progress progress;
    const auto report =
        WriteCheckpoint(*saved_, {.directory = [this](uint64_t) { return path_; }}, cancelled, &progress);
    EXPECT_TRUE(report.status.ok()) << report.status;
    std::ifstream file(path_ + "/" + kIndexFile);
    text_ = {std::istreambuf_iterator<char>(file), {}};
  }
  ~DamagedIndexTest() override { std::filesystem::remove_all(std::filesystem::path(path_).parent_path()); }

  optimizer::OptimizerPtr Create(const std::string& name) {
    engine::OptimizerSpec spec;
    spec.groups.assign(2, spec.algorithm->DefaultScalars());
    spec.parameters = {{.name = "w", .shape = {4, 3}, .group = 0}, {.name = "b", .shape = {3}, .group = 1}};
    return *house_.table.Create(FakeHouse::User(::geteuid()), name, spec, {}, "description");
  }
  optimizer::AttachedTrainer Trainer() { return {++epoch_, FakeHouse::User(::geteuid()), std::nullopt}; }

  // To a state of `value` everywhere, with hyper-parameters of their own.
  void Restore(optimizer::HostedOptimizer& optimizer, uint64_t steps, float value) {
    engine::StepEngine::Moment moment{
        .statistics = {}, .groups = optimizer.spec().groups, .parameter_steps = {steps, steps - 1}};
    moment.statistics.step = moment.statistics.committed_steps = steps;
    moment.groups[1][0] = static_cast<double>(value) / 100;
    const absl::Status restored = optimizer.Restore(Trainer(), moment, 5, [&] {
      float* const state = reinterpret_cast<float*>(optimizer.memory().state.data());
      std::fill_n(state, optimizer.memory().state.bytes() / sizeof(float), value);
      return absl::OkStatus();
    });
    ASSERT_TRUE(restored.ok()) << restored;
  }

  // What training goes on with.
  static std::string StateOf(const optimizer::HostedOptimizer& optimizer) {
    const engine::Layout& layout = optimizer.layout();
    std::string state;
    for (size_t i = 0; i < layout.placements.size(); ++i) {
      for (size_t array = 0; array < layout.formats[0].arrays.size(); ++array) {
        const std::byte* const first =
            optimizer.memory().state.data() + layout.formats[0].Byte(array, layout.placements[i].state_offset);
        state.append(reinterpret_cast<const char*>(first),
                     engine::ElementCount(optimizer.spec().parameters[i]) * sizeof(float));
      }
    }
    for (const engine::Scalars& group : optimizer.engine().groups()) {
      state.append(reinterpret_cast<const char*>(group.data()), group.size() * sizeof(double));
    }
    for (const uint64_t steps : optimizer.engine().parameter_steps()) absl::StrAppend(&state, steps, " ");
    return absl::StrCat(state, optimizer.engine().statistics().committed_steps);
  }

  absl::Status RestoreWith(optimizer::HostedOptimizer& into, const std::string& index) {
    std::ofstream(path_ + "/" + kIndexFile, std::ios::trunc) << index;
    return RestoreCheckpoint(into, Trainer(), {.directories = {path_}}).status();
  }

  std::string path_ = [] {
    std::string path = ::testing::TempDir() + "/damaged-index-XXXXXX";
    return std::string(::mkdtemp(path.data())) + "/saved";
  }();
  FakeHouse house_;
  uint64_t epoch_ = 0;
  optimizer::OptimizerPtr saved_;
  std::string text_;  // of its index
};

TEST_F(DamagedIndexTest, EveryChangeRestoresTheStateThatWasSavedOrIsRefused) {
  const optimizer::OptimizerPtr into = Create("into");
  Restore(*into, 3, 0.5f);
  const std::string before = StateOf(*into);
  size_t changed = 0, noticed = 0;
  for (size_t at = 0; at < text_.size(); ++at) {
    for (const char c : {'0', '1', '7', '9', '-', 'e', ' ', ',', static_cast<char>(text_[at] ^ 1)}) {
      if (c == text_[at]) continue;
      std::string text = text_;
      text[at] = c;
      ++changed;
      const absl::Status status = RestoreWith(*into, text);
      if (!status.ok()) {
        ++noticed;
        ASSERT_EQ(StateOf(*into), before) << status;
        continue;
      }
      EXPECT_EQ(StateOf(*into), StateOf(*saved_))
          << "byte " << at << " of " << text_.substr(at / 20 * 20, 40) << " is " << c;
      Restore(*into, 3, 0.5f);
    }
  }
  EXPECT_EQ(noticed, changed);
  const absl::Status whole = RestoreWith(*into, text_);
  EXPECT_TRUE(whole.ok()) << whole;
  EXPECT_EQ(StateOf(*into), StateOf(*saved_));
}

TEST_F(DamagedIndexTest, OneOfAReleaseThatSummedNothingUpIsRestored) {
  const optimizer::OptimizerPtr into = Create("into");
  const std::string older = absl::StrReplaceAll(text_.substr(0, text_.find(absl::StrCat(",\n \"", kSumKey))) + "\n}\n",
                                                {{"\"version\": 3", "\"version\": 2"}});
  const absl::Status restored = RestoreWith(*into, older);
  ASSERT_TRUE(restored.ok()) << restored;
  EXPECT_EQ(StateOf(*into), StateOf(*saved_));
  EXPECT_EQ(RestoreWith(*into, absl::StrReplaceAll(older, {{"\"version\": 2", "\"version\": 3"}})).code(),
            absl::StatusCode::kDataLoss);
}

// Whoever makes a checkpoint can sum it up as well.
TEST_F(DamagedIndexTest, NumbersOfStepsThatNoOptimizerMakesAreRefused) {
  const optimizer::OptimizerPtr into = Create("into");
  for (const uint64_t steps : {engine::kMaxSteps + 1, uint64_t{1} << 62, (uint64_t{1} << 63) - 1, uint64_t{1} << 63,
                               ~uint64_t{0} - 1, ~uint64_t{0}}) {
    std::string text = absl::StrReplaceAll(text_, {{"\"step\": 7", absl::StrCat("\"step\": ", steps)},
                                                   {"_steps\": 7", absl::StrCat("_steps\": ", steps)}});
    text = SumUp(text.substr(0, text.find(absl::StrCat(",\n \"", kSumKey))) + "\n}");
    const absl::Status status = RestoreWith(*into, text);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << steps << ": " << status;
    EXPECT_EQ(into->engine().statistics().committed_steps, 0u);
    const std::string file = path_ + "/model-00001-of-00001.safetensors";
    EXPECT_EQ(RestoreCheckpoint(*into, Trainer(), {.directories = {}, .files = {{file, steps}}}).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(DamagedIndexTest, AnOptimizerThatHasMadeAllStepsMakesNoMoreAndCanBeDeleted) {
  const optimizer::OptimizerPtr into = Create("into");
  Restore(*into, engine::kMaxSteps, 0.5f);
  const absl::Status begun = into->engine().BeginStep(engine::kMaxSteps + 1, 1);
  EXPECT_EQ(begun.code(), absl::StatusCode::kFailedPrecondition) << begun;
  EXPECT_THAT(std::string(begun.message()), HasSubstr("at most 4294967295 steps"));
  EXPECT_TRUE(house_.table.Delete(FakeHouse::User(::geteuid()), "into").ok());
}

}  // namespace
}  // namespace superoffload::checkpoint
