// A checkpoint knows parameters by name and shape: an optimizer of any layout reads what one of another has written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "server/checkpoint/reader.h"
#include "server/checkpoint/run_directory.h"
#include "server/checkpoint/writer.h"
#include "tests/unit/server/optimizer/fake_house.h"

namespace superoffload::checkpoint {
namespace {

using optimizer::FakeHouse;
using optimizer::HostedOptimizer;
using optimizer::OptimizerPtr;

constexpr uint64_t kCommitted = 7;

engine::OptimizerSpec SpecOf(uint32_t layout_version, uint64_t bucket_bytes) {
  engine::OptimizerSpec spec;
  spec.groups.assign(2, spec.algorithm->DefaultScalars());
  spec.layout_version = layout_version;
  spec.bucket_bytes = bucket_bytes;
  const std::vector<std::vector<uint64_t>> shapes = {{37, 19}, {37}, {5000}, {}, {90, 300}};
  for (uint32_t i = 0; i < shapes.size(); ++i) {
    spec.parameters.push_back({.name = "p" + std::to_string(i), .shape = shapes[i], .group = i % 2});
  }
  return spec;
}

class LayoutsTest : public ::testing::Test {
 protected:
  ~LayoutsTest() override { std::filesystem::remove_all(directory_); }

  OptimizerPtr Create(const std::string& name, uint32_t layout_version, uint64_t bucket_bytes) {
    return *house_.table.Create(FakeHouse::User(::geteuid()), name, SpecOf(layout_version, bucket_bytes), {},
                                "description");
  }
  optimizer::AttachedTrainer Trainer() { return {++epoch_, FakeHouse::User(::geteuid()), std::nullopt}; }

  static float* State(const HostedOptimizer& optimizer, size_t array, size_t parameter) {
    const engine::Layout& layout = optimizer.layout();
    return reinterpret_cast<float*>(optimizer.memory().state.data() +
                                    layout.formats[0].Byte(array, layout.placements[parameter].state_offset));
  }

  // Of each parameter's elements, array after array.
  static std::vector<std::vector<float>> StateOf(const HostedOptimizer& optimizer) {
    std::vector<std::vector<float>> all;
    for (size_t i = 0; i < optimizer.spec().parameters.size(); ++i) {
      std::vector<float>& elements = all.emplace_back();
      for (size_t array = 0; array < optimizer.layout().formats[0].arrays.size(); ++array) {
        const float* const first = State(optimizer, array, i);
        elements.insert(elements.end(), first, first + engine::ElementCount(optimizer.spec().parameters[i]));
      }
    }
    return all;
  }

  void Fill(HostedOptimizer& optimizer) {
    engine::StepEngine::Moment moment{.statistics = {}, .groups = optimizer.spec().groups, .parameter_steps = {}};
    moment.statistics.step = moment.statistics.committed_steps = kCommitted;
    moment.parameter_steps.assign(optimizer.spec().parameters.size(), kCommitted);
    const auto load = [&] {
      float value = 0;
      for (size_t i = 0; i < optimizer.spec().parameters.size(); ++i) {
        const uint64_t elements = engine::ElementCount(optimizer.spec().parameters[i]);
        for (size_t array = 0; array < optimizer.layout().formats[0].arrays.size(); ++array) {
          for (uint64_t j = 0; j < elements; ++j) State(optimizer, array, i)[j] = value += 0.25f;
        }
      }
      return absl::OkStatus();
    };
    ASSERT_TRUE(optimizer.Restore(Trainer(), moment, 0, load).ok());
  }

  const std::string directory_ = [] {
    std::string path = ::testing::TempDir() + "/layouts-XXXXXX";
    return std::string(::mkdtemp(path.data()));
  }();
  FakeHouse house_;
  uint64_t epoch_ = 0;
};

TEST_F(LayoutsTest, ACheckpointOfOneLayoutIsRestoredIntoAnother) {
  const OptimizerPtr older = Create("older", engine::kOldestLayoutVersion, 8192);
  ASSERT_NO_FATAL_FAILURE(Fill(*older));
  const std::vector<std::vector<float>> expected = StateOf(*older);
  for (const bool back : {false, true}) {
    const OptimizerPtr from = back ? *house_.table.Get(FakeHouse::User(::geteuid()), "newer") : older;
    const OptimizerPtr to =
        back ? Create("older-again", engine::kOldestLayoutVersion, 4096) : Create("newer", engine::kLayoutVersion, 0);
    EXPECT_NE(from->layout().state_elements(), to->layout().state_elements());
    const std::string path = directory_ + (back ? "/back" : "/forth");
    const std::atomic<bool> cancelled = false;
    Progress progress;
    const optimizer::CheckpointReport report =
        WriteCheckpoint(*from, {.directory = [&](uint64_t) { return path; }}, cancelled, &progress);
    ASSERT_TRUE(report.status.ok()) << report.status;
    const absl::Status restored = RestoreCheckpoint(*to, Trainer(), {.directories = {path}}).status();
    ASSERT_TRUE(restored.ok()) << restored;
    EXPECT_EQ(to->engine().statistics().committed_steps, kCommitted);
    EXPECT_EQ(StateOf(*to), expected);
  }
}

// A snapshot holds up steps that would write the state.
TEST_F(LayoutsTest, OlderCheckpointsAreLookedAtWhileNoSnapshotIsOpen) {
  const OptimizerPtr optimizer = Create("listed", engine::kLayoutVersion, 0);
  ASSERT_NO_FATAL_FAILURE(Fill(*optimizer));
  const std::atomic<bool> cancelled = false;
  Progress progress;
  int looked = 0;
  const auto look = [&]() -> uint64_t {
    EXPECT_FALSE(optimizer->engine().ClaimSnapshotBucket().has_value());
    ++looked;
    return 5;
  };
  const optimizer::CheckpointReport report =
      WriteCheckpoint(*optimizer, {.sequence = look, .directory = [&](uint64_t) { return directory_ + "/listed"; }},
                      cancelled, &progress);
  ASSERT_TRUE(report.status.ok()) << report.status;
  EXPECT_EQ(looked, 1);
  EXPECT_EQ(ReadIndex(directory_ + "/listed")->sequence, 5u);
}

}  // namespace
}  // namespace superoffload::checkpoint
