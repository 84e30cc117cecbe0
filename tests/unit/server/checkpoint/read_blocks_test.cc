// Codes whose blocks were cut as they are wanted come to the bit; others are decoded, and encoded in the blocks they
// come to, however many ranks have saved and restore them. So are moments that were saved in another dtype.
#include "server/checkpoint/read_blocks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/elements/elements.h"
#include "server/checkpoint/index.h"
#include "server/checkpoint/reader.h"
#include "server/checkpoint/writer.h"
#include "tests/unit/server/optimizer/fake_house.h"

namespace superoffload::checkpoint {
namespace {

using optimizer::FakeHouse;
using optimizer::HostedOptimizer;
using optimizer::OptimizerPtr;
using ::testing::HasSubstr;

constexpr uint64_t kRows = 11, kColumns = 100, kSteps = 7;
constexpr size_t kCodes = 1, kScales = 2;  // arrays

const kernels::Algorithm& Momentum8() { return *kernels::FindAlgorithm("test_momentum_8bit"); }
uint64_t Block() { return Momentum8().block_elements; }
const kernels::BlockCodec& Codec() { return *Momentum8().arrays[kCodes].codec; }

class ReadBlocksTest : public ::testing::Test {
 protected:
  ~ReadBlocksTest() override { std::filesystem::remove_all(directory_); }

  // Of rows and columns [first, end) of one parameter.
  struct Part {
    uint64_t first_row = 0, end_row = kRows, first_column = 0, end_column = kColumns;
    uint64_t rows() const { return end_row - first_row; }
    uint64_t columns() const { return end_column - first_column; }
  };

  OptimizerPtr Create(const Part& part, const kernels::Algorithm& algorithm = Momentum8(), bool in_fp32 = false) {
    engine::OptimizerSpec spec;
    spec.algorithm = &algorithm;
    spec.groups.assign(1, spec.algorithm->DefaultScalars());
    spec.parameters = {{.name = "w", .shape = {part.rows(), part.columns()}, .group = 0, .in_fp32 = in_fp32}};
    if (part.rows() < kRows || part.columns() < kColumns) {
      spec.parameters[0].global_shape = {kRows, kColumns};
      spec.parameters[0].global_offset = {part.first_row, part.first_column};
    }
    return *house_.table.Create(FakeHouse::User(::geteuid()), absl::StrCat("o", ++created_), spec, {}, "description");
  }
  optimizer::AttachedTrainer Trainer() { return {++epoch_, FakeHouse::User(::geteuid()), std::nullopt}; }

  template <typename T>
  static T* Array(const HostedOptimizer& optimizer, size_t array) {
    const engine::Layout& layout = optimizer.layout();
    return reinterpret_cast<T*>(optimizer.memory().state.data() +
                                layout.FormatOf(layout.placements[0]).Byte(array, layout.placements[0].state_offset));
  }
  static uint64_t Elements(const HostedOptimizer& optimizer) {
    return engine::ElementCount(optimizer.spec().parameters[0]);
  }

  // How the moment is stored.
  static const kernels::StateArray& Moment(const HostedOptimizer& optimizer) {
    const engine::Layout& layout = optimizer.layout();
    return layout.FormatOf(layout.placements[0]).algorithm->arrays[kCodes];
  }

  // The numbers of the moment, row-major.
  static std::vector<float> Decoded(const HostedOptimizer& optimizer) {
    std::vector<float> values(Elements(optimizer));
    const kernels::StateArray& array = Moment(optimizer);
    if (array.codec == nullptr) {
      kernels::Widen(values.size(), {Array<std::byte>(optimizer, kCodes), array.dtype}, values.data());
      return values;
    }
    for (uint64_t i = 0; i < values.size(); i += Block()) {
      array.codec->decode(std::min(Block(), values.size() - i), Array<uint8_t>(optimizer, kCodes) + i,
                          Array<float>(optimizer, kScales) + i / Block(), values.data() + i);
    }
    return values;
  }

  // Writes them.
  static void Encode(const std::vector<float>& values, HostedOptimizer& optimizer) {
    const kernels::StateArray& array = Moment(optimizer);
    if (array.codec != nullptr) {
      Encode(*array.codec, values, Array<uint8_t>(optimizer, kCodes), Array<float>(optimizer, kScales));
    } else {
      kernels::Narrow(values.size(), values.data(), {Array<std::byte>(optimizer, kCodes), array.dtype});
    }
  }

  void Fill(HostedOptimizer& optimizer) {
    engine::StepEngine::Moment moment{.statistics = {}, .groups = optimizer.spec().groups, .parameter_steps = {kSteps}};
    moment.statistics.step = moment.statistics.committed_steps = kSteps;
    const absl::Status filled = optimizer.Restore(Trainer(), moment, 0, [&] {
      std::normal_distribution<float> normal;
      std::vector<float> values(Elements(optimizer));
      for (float& value : values) value = normal(random_);
      std::copy(values.begin(), values.end(), Array<float>(optimizer, 0));
      Encode(values, optimizer);
      return absl::OkStatus();
    });
    ASSERT_TRUE(filled.ok()) << filled;
  }

  static void Encode(const kernels::BlockCodec& codec, const std::vector<float>& values, uint8_t* codes,
                     float* scales) {
    for (uint64_t i = 0; i < values.size(); i += Block()) {
      codec.encode(std::min(Block(), values.size() - i), values.data() + i, codes + i, scales + i / Block());
    }
  }

  // Returns the checkpoint's directory.
  std::string Save(HostedOptimizer& optimizer) {
    const std::string path = absl::StrCat(directory_, "/", optimizer.id().name);
    const std::atomic<bool> cancelled = false;
    Progress progress;
    const optimizer::CheckpointReport report =
        WriteCheckpoint(optimizer, {.directory = [&](uint64_t) { return path; }}, cancelled, &progress);
    EXPECT_TRUE(report.status.ok()) << report.status;
    return path;
  }

  static uint64_t BlocksThatDiffer(const std::vector<float>& a, const std::vector<float>& b) {
    uint64_t differing = 0;
    for (size_t first = 0; first < a.size(); first += Block()) {
      const auto end = static_cast<ptrdiff_t>(std::min(first + Block(), a.size()));
      differing += !std::equal(a.begin() + static_cast<ptrdiff_t>(first), a.begin() + end,
                               b.begin() + static_cast<ptrdiff_t>(first));
    }
    return differing;
  }

  // What ranks with these parts save, restored into ranks with those. Compares every bit; returns how many blocks had
  // to be rounded.
  uint64_t ExpectRestored(const std::vector<Part>& saved, const std::vector<Part>& wanted) {
    uint64_t rounded = 0;
    [&] { Compare(saved, wanted, &rounded); }();
    return rounded;
  }

  void Compare(const std::vector<Part>& saved, const std::vector<Part>& wanted, uint64_t* rounded) {
    std::vector<std::string> directories;
    std::vector<float> masters(kRows * kColumns), moments(kRows * kColumns);
    for (const Part& part : saved) {
      const OptimizerPtr optimizer = Create(part);
      ASSERT_NO_FATAL_FAILURE(Fill(*optimizer));
      directories.push_back(Save(*optimizer));
      const std::vector<float> decoded = Decoded(*optimizer);
      for (uint64_t i = 0; i < decoded.size(); ++i) {
        const uint64_t at = (part.first_row + i / part.columns()) * kColumns + part.first_column + i % part.columns();
        masters[at] = Array<float>(*optimizer, 0)[i];
        moments[at] = decoded[i];
      }
    }
    uint64_t differing = 0;
    for (const Part& part : wanted) {
      const OptimizerPtr optimizer = Create(part);
      const absl::StatusOr<Restored> restored = RestoreCheckpoint(*optimizer, Trainer(), {.directories = directories});
      ASSERT_TRUE(restored.ok()) << restored.status();
      *rounded += restored->blocks_rounded;
      std::vector<float> own_masters, own_moments;
      for (uint64_t row = part.first_row; row < part.end_row; ++row) {
        const auto take = [&](const std::vector<float>& from, std::vector<float>* to) {
          const auto first = from.begin() + static_cast<ptrdiff_t>(row * kColumns);
          to->insert(to->end(), first + static_cast<ptrdiff_t>(part.first_column),
                     first + static_cast<ptrdiff_t>(part.end_column));
        };
        take(masters, &own_masters);
        take(moments, &own_moments);
      }
      std::vector<uint8_t> codes(own_moments.size());
      std::vector<float> scales(Momentum8().arrays[kScales].Entries(own_moments.size()));
      Encode(Codec(), own_moments, codes.data(), scales.data());
      differing += BlocksThatDiffer(own_moments, Decoded(*optimizer));
      const auto bits = [](const auto* first, size_t count) {
        return std::string(reinterpret_cast<const char*>(first), count * sizeof(*first));
      };
      EXPECT_EQ(bits(Array<float>(*optimizer, 0), own_masters.size()), bits(own_masters.data(), own_masters.size()));
      EXPECT_EQ(bits(Array<uint8_t>(*optimizer, kCodes), codes.size()), bits(codes.data(), codes.size()));
      EXPECT_EQ(bits(Array<float>(*optimizer, kScales), scales.size()), bits(scales.data(), scales.size()));
    }
    EXPECT_EQ(*rounded, differing);
  }

  const std::string directory_ = [] {
    std::string path = ::testing::TempDir() + "/blocks-XXXXXX";
    return std::string(::mkdtemp(path.data()));
  }();
  FakeHouse house_;
  uint64_t epoch_ = 0;
  int created_ = 0;
  std::mt19937 random_{17};
};

TEST_F(ReadBlocksTest, TheSameRanksHaveEveryBit) {
  EXPECT_EQ(ExpectRestored({{}}, {{}}), 0u);
  EXPECT_EQ(ExpectRestored({{0, 4}, {4, 11}}, {{0, 4}, {4, 11}}), 0u);
}

// 1100 elements are 5 blocks; a rank's 4 rows are one of 256 and a part of one.
TEST_F(ReadBlocksTest, RanksOfAnotherNumberEncodeTheBlocksThatAreCutElsewhere) {
  EXPECT_GT(ExpectRestored({{0, 4}, {4, 11}}, {{}}), 0u);
  EXPECT_GT(ExpectRestored({{}}, {{0, 4}, {4, 11}}), 0u);
  EXPECT_GT(ExpectRestored({{0, 4}, {4, 11}}, {{0, 8}, {8, 11}}), 0u);
}

TEST_F(ReadBlocksTest, ColumnsAreCutEverywhere) {
  EXPECT_GT(ExpectRestored({{}}, {{0, kRows, 0, 30}, {0, kRows, 30, kColumns}}), 0u);
  EXPECT_GT(ExpectRestored({{0, kRows, 0, 30}, {0, kRows, 30, kColumns}}, {{}}), 0u);
}

// Of all pairs of dtypes, from ranks and from one.
TEST_F(ReadBlocksTest, MomentsOfAnotherDTypeAreConverted) {
  const char* const kAlgorithms[] = {"lion", "lion_bf16", "lion_8bit"};
  for (const char* from : kAlgorithms) {
    for (const char* to : kAlgorithms) {
      for (const bool ranks : {false, true}) {
        SCOPED_TRACE(absl::StrCat(from, " to ", to, ranks ? " from ranks" : ""));
        const std::vector<Part> parts = ranks ? std::vector<Part>{{0, 4}, {4, 11}} : std::vector<Part>{{}};
        std::vector<std::string> directories;
        std::vector<float> moments;  // of rows one after the other
        for (const Part& part : parts) {
          const OptimizerPtr optimizer = Create(part, *kernels::FindAlgorithm(from));
          ASSERT_NO_FATAL_FAILURE(Fill(*optimizer));
          directories.push_back(Save(*optimizer));
          const std::vector<float> own = Decoded(*optimizer);
          moments.insert(moments.end(), own.begin(), own.end());
        }
        const OptimizerPtr optimizer = Create({}, *kernels::FindAlgorithm(to));
        const absl::StatusOr<Restored> restored =
            RestoreCheckpoint(*optimizer, Trainer(), {.directories = directories});
        ASSERT_TRUE(restored.ok()) << restored.status();
        const std::vector<float> found = Decoded(*optimizer);
        const bool coded = Moment(*optimizer).codec != nullptr;
        EXPECT_EQ(restored->tensors_converted, !coded && from != std::string(to) ? 1u : 0u);
        EXPECT_EQ(restored->blocks_rounded, coded ? BlocksThatDiffer(moments, found) : 0u);
        Encode(moments, *optimizer);
        EXPECT_EQ(found, Decoded(*optimizer));
      }
    }
  }
}

TEST_F(ReadBlocksTest, AParameterInFp32GoesIntoCodesAndBack) {
  const kernels::Algorithm& algorithm = *kernels::FindAlgorithm("lion_8bit");
  for (const bool from : {false, true}) {
    const OptimizerPtr saved = Create({}, algorithm, from);
    ASSERT_NO_FATAL_FAILURE(Fill(*saved));
    const std::string directory = Save(*saved);
    for (const bool to : {false, true}) {
      const OptimizerPtr optimizer = Create({}, algorithm, to);
      const absl::StatusOr<Restored> restored = RestoreCheckpoint(*optimizer, Trainer(), {.directories = {directory}});
      ASSERT_TRUE(restored.ok()) << restored.status();
      const std::vector<float> found = Decoded(*optimizer);
      if (from == to || to) {
        EXPECT_EQ(found, Decoded(*saved));
      }
      Encode(Decoded(*saved), *optimizer);
      EXPECT_EQ(found, Decoded(*optimizer));
    }
  }
}

TEST_F(ReadBlocksTest, WhatHasNoScalesOrOthersIsRefused) {
  const OptimizerPtr saved = Create({}), into = Create({});
  ASSERT_NO_FATAL_FAILURE(Fill(*saved));
  const std::string path = Save(*saved);
  Index index = *ReadIndex(path);
  const auto restore = [&](const Index& changed) {
    std::ofstream(absl::StrCat(path, "/", kIndexFile), std::ios::trunc) << EncodeIndex(changed);
    return RestoreCheckpoint(*into, Trainer(), {.directories = {path}}).status();
  };
  const std::string codes(Momentum8().arrays[kCodes].name);
  Index changed = index;
  changed.blocks[codes].elements = 128;
  absl::Status status = restore(changed);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(status.message(), HasSubstr("5 scales of 9 blocks"));
  changed = index;
  changed.algorithm = "one that only another release has";
  status = restore(changed);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(status.message(), HasSubstr("scales that this daemon does not know"));
  changed = index;
  changed.blocks.clear();
  status = restore(changed);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(status.message(), HasSubstr("codes without their scales"));
  changed = index;
  changed.blocks[codes].scales = "model";
  status = restore(changed);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(into->engine().statistics().committed_steps, 0u);
  EXPECT_TRUE(restore(index).ok());
}

}  // namespace
}  // namespace superoffload::checkpoint
