// Whoever absorbs says in the undo slot where each range of elements begins: where parameters between two of them are
// left out, the next granule may take the place of the last one in the slot, which must no longer be undone then.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "server/engine/bucket_pass.h"
#include "server/engine/recovery.h"
#include "server/engine/segments.h"
#include "tests/support/sequential_optimizer.h"

namespace superoffload::engine {
namespace {

constexpr uint64_t kElements = 256;  // of a parameter, and so of a range

// What the slot says as a call begins; each call then leaves its last element named.
std::vector<uint64_t> begun;

void Note(size_t n, kernels::UndoSlot* undo) {
  begun.push_back(undo->torn);
  undo->torn = kernels::TornGranule(n - 1, 1);
}

void Absorb(size_t, size_t n, const kernels::StateView&, const kernels::StepConstants&, kernels::ConstElements,
            kernels::UndoSlot* undo) {
  Note(n, undo);
}

void AbsorbAndPublish(size_t, size_t n, const kernels::StateView&, const kernels::StepConstants&,
                      kernels::ConstElements, const kernels::StepConstants&, kernels::ConstElements,
                      kernels::MutableElements, kernels::NormLanes*, kernels::UndoSlot* undo) {
  Note(n, undo);
}

const kernels::Algorithm& NotingAlgorithm() {
  static constexpr kernels::AlgorithmKernels kKernels = {"NOTES", Absorb, nullptr, AbsorbAndPublish, nullptr};
  static const std::vector<const kernels::AlgorithmKernels*> supported = {&kKernels};
  static const kernels::Algorithm algorithm = [] {
    kernels::Algorithm copy = *kernels::Algorithms().front();
    copy.supported = []() -> const std::vector<const kernels::AlgorithmKernels*>& { return supported; };
    return copy;
  }();
  return algorithm;
}

class CallersPool final : public WorkerPool {
 public:
  void Submit(ChunkJob* job, size_t chunks) override {
    for (size_t i = 0; i < chunks; ++i) job->RunChunk(i, 0);
    job->Done();
  }
  size_t worker_count() const override { return 1; }
  bool idle_work_is_free() const override { return false; }
};

// Three parameters in one bucket, of which the one in the middle has no gradient in step 1.
class UndoRangesTest : public ::testing::Test {
 protected:
  UndoRangesTest() : record_(memory_.view().record, layout_) {
    begun.clear();
    record_.EndPush();
    record_.Commit({1, spec_.groups[0]}, {.absent = {false, true, false}});
  }

  static OptimizerSpec Spec() {
    OptimizerSpec spec;
    spec.algorithm = &NotingAlgorithm();
    spec.groups = {spec.algorithm->DefaultScalars()};
    for (const char* name : {"a", "b", "c"}) spec.parameters.push_back({.name = name, .shape = {kElements}});
    return spec;
  }

  std::vector<Segment> Segments(bool publishes) const {
    using Constants = std::optional<kernels::StepConstants>;
    const auto absorb = [&](uint32_t p) { return record_.Had(1, p) ? Constants(std::in_place) : std::nullopt; };
    const auto publish = [&](uint32_t) { return publishes ? Constants(std::in_place) : std::nullopt; };
    return MakeSegments(layout_, layout_.buckets[0], absorb, publish);
  }

  static std::vector<uint64_t> BothRanges() {
    return {kernels::TornGranule(0, 0), kernels::TornGranule(2 * kElements, 0)};
  }

  const OptimizerSpec spec_ = Spec();
  const Layout layout_ = *PlanLayout(spec_);
  test::Memory memory_{layout_};
  Record record_;
  CallersPool pool_;
};

TEST_F(UndoRangesTest, APassBeginsEach) {
  BucketPass pass(0, layout_, memory_.view(), &record_, [](uint32_t) {});
  pass.Start(&pool_, {.kind = PassKind::kAbsorb, .segments = Segments(false), .absorbed_step = 1});
  EXPECT_EQ(begun, BothRanges());
}

TEST_F(UndoRangesTest, RecoveryBeginsEach) {
  RecoveryPass pass(layout_, memory_.view(), &record_, [] {});
  pass.Start(&pool_);
  EXPECT_EQ(begun, BothRanges());
}

TEST_F(UndoRangesTest, RepairBeginsWhereTheTornGranuleWas) {
  kernels::UndoSlot* const slot = record_.BeginAbsorb(0, 0, 1);
  slot->torn = kernels::TornGranule(kElements - 8, 8);
  RecoveryPass pass(layout_, memory_.view(), &record_, [] {});
  pass.Start(&pool_);
  EXPECT_THAT(begun,
              ::testing::ElementsAre(kernels::TornGranule(kElements - 8, 0), kernels::TornGranule(2 * kElements, 0)));
}

}  // namespace
}  // namespace superoffload::engine
