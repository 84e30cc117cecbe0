// The undo slot's promise: whatever instruction a process is killed at, UndoTornGranule and a second run of what was
// not updated give the bits of an undisturbed pass.
#include "kernels/undo_slot.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/support/kernel_arrays.h"
#include "tests/support/random_elements.h"

namespace superoffload::kernels {
namespace {

// Ranges of state in memory that survives its process.
template <size_t kElements>
struct Memory {
  UndoSlot slot;
  std::byte old[kMaxStateArrays * UndoElements(256) * sizeof(float)];  // of any algorithm
  uint64_t completed;                                                  // ranges that the owner recorded as complete
  alignas(64) float arrays[kMaxStateArrays][kElements], pending[kElements], gradient[kElements];  // of any dtype
  alignas(64) uint16_t theta[kElements];

  StateView state(size_t first = 0) {
    static const BoxElements whole;
    StateView view;
    for (size_t a = 0; a < kMaxStateArrays; ++a) view.arrays[a] = arrays[a] + first;
    view.rounding = {{{3, 4}}, &whole, first};
    return view;
  }
  ConstElements Pending(size_t first = 0) const { return {pending + first, DType::kFloat32}; }
  ConstElements Gradient(size_t first = 0) const { return {gradient + first, DType::kFloat32}; }
  MutableElements Theta(size_t first = 0) { return {theta + first, DType::kBFloat16}; }

  bool SameState(const Memory& other, size_t n) const {
    for (size_t a = 0; a < kMaxStateArrays; ++a) {
      if (std::memcmp(arrays[a], other.arrays[a], 4 * n) != 0) return false;
    }
    return true;
  }

  void FillRandomly(std::mt19937_64& random) {
    for (size_t i = 0; i < kElements; ++i) {
      arrays[0][i] = test::NearlyNormal(random);
      for (size_t a = 1; a < kMaxStateArrays; ++a) {
        arrays[a][i] = (a == 1 ? 1e-3f : 1e-6f) * test::NearlyNormal(random);
        if (a > 1) arrays[a][i] = std::abs(arrays[a][i]);
      }
      pending[i] = 1e-3f * test::NearlyNormal(random);
      gradient[i] = 1e-3f * test::NearlyNormal(random);
    }
  }
};

template <typename T>
class Shared {
 public:
  Shared()
      : memory_(
            static_cast<T*>(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~Shared() { ::munmap(memory_, sizeof(T)); }
  T* operator->() const { return memory_; }
  T& operator*() const { return *memory_; }

 private:
  T* const memory_;
};

class UndoSlotTest : public ::testing::TestWithParam<TestedTarget> {
 protected:
  const Algorithm& algorithm() const { return *GetParam().algorithm; }
  const AlgorithmKernels& kernels() const { return *GetParam().kernels; }
  StepConstants Constants(uint64_t t, double gradient_scale) const {
    return algorithm().make_constants(algorithm().DefaultScalars().data(), t, gradient_scale);
  }
  size_t Undo(const UndoSlot& slot, size_t n, const StateView& state) const {
    return UndoTornGranule(slot, n, algorithm(), state);
  }

  struct Range {
    size_t first, end;
  };
  template <size_t kElements>
  void DieAtEveryInstruction(const std::vector<Range>& ranges, std::mt19937_64& random);

  const StepConstants absorb_ = Constants(3, 0.5), publish_ = Constants(4, 1);
  NormLanes norm_;
};

// One process is stepped through a pass over `ranges`, which end before element `n`, instruction by instruction by
// another, which after each looks at the memory that a kill at that instruction would leave, and recovers a copy of it.
template <size_t kElements>
void UndoSlotTest::DieAtEveryInstruction(const std::vector<Range>& ranges, std::mt19937_64& random) {
  using SmallMemory = Memory<kElements>;
  const AlgorithmKernels& kernels = this->kernels();
  const size_t n = ranges.back().end;
  Shared<SmallMemory> shared;
  shared->FillRandomly(random);
  const auto initial = std::make_unique<SmallMemory>(*shared);
  const auto expected = std::make_unique<SmallMemory>(*shared);
  for (const auto [first, end] : ranges) {
    kernels.absorb(first, end, expected->state(), absorb_, expected->Pending(), nullptr);
  }

  const pid_t child = ::fork();
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(0);
    ::raise(SIGSTOP);
    BeginUndo(shared->slot, 1);
    for (const auto [first, end] : ranges) {
      BeginRange(shared->slot, first);
      kernels.absorb_and_publish(first, end, shared->state(), absorb_, shared->Pending(), publish_, shared->Gradient(),
                                 shared->Theta(), &norm_, &shared->slot);
    }
    shared->completed = 1;
    EndUndo(shared->slot);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (!WIFSTOPPED(status)) GTEST_SKIP() << "no ptrace here (emulators have none)";
  size_t instructions = 0, torn = 0;
  const auto left = std::make_unique<SmallMemory>();
  for (; WIFSTOPPED(status); ++instructions) {
    std::memcpy(static_cast<void*>(left.get()), &*shared, sizeof(SmallMemory));
    if (left->slot.claim == 0 || left->completed == 1) {
      ASSERT_TRUE(left->SameState(left->completed == 1 ? *expected : *initial, n)) << instructions;
    } else {
      const size_t done = Undo(left->slot, n, left->state());
      ASSERT_LT(done, n);
      torn += done > 0;
      for (const auto [first, end] : ranges) {
        if (end <= done) continue;
        BeginRange(left->slot, std::max(first, done));
        kernels.absorb(std::max(first, done), end, left->state(), absorb_, left->Pending(), &left->slot);
      }
      ASSERT_TRUE(left->SameState(*expected, n)) << "after " << instructions << " instructions";
    }
    ASSERT_EQ(::ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr), 0);
    ::waitpid(child, &status, 0);
  }
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_GT(instructions, ranges.back().end - ranges.back().first);
  EXPECT_EQ(torn > 0, shared->slot.torn >> 16 > 0);
}

TEST_P(UndoSlotTest, EveryInstructionIsASafePlaceToDie) {
  std::mt19937_64 random(1);
  for (const size_t n : {1, 5, 16, 37, 100}) {
    SCOPED_TRACE(n);
    DieAtEveryInstruction<128>({{0, n}}, random);
  }
}

// What is left out between two ranges may have any length: granules of both have the same place in the slot.
TEST_P(UndoSlotTest, EveryInstructionOfRangesWithAGapIsASafePlaceToDie) {
  std::mt19937_64 random(1);
  DieAtEveryInstruction<640>({{0, 21}, {512, 520}}, random);
}

// Processes work on a shared optimizer of several ranges, step after step, and are killed at random, until enough of
// them died in the middle of a granule.
TEST_P(UndoSlotTest, KilledAgainAndAgain) {
  constexpr size_t kRanges = 8, kRangeElements = 4096, kTorn = 300;
  using Optimizer = Memory<kRanges * kRangeElements>;
  const AlgorithmKernels& kernels = this->kernels();
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  Shared<Optimizer> shared;
  shared->FillRandomly(random);
  const auto undisturbed = std::make_unique<Optimizer>(*shared);
  const auto run_pass = [&](Optimizer& memory, uint64_t index, UndoSlot* undo) {
    const size_t first = index % kRanges * kRangeElements;
    kernels.absorb_and_publish(0, kRangeElements, memory.state(first), Constants(index / kRanges + 1, 1),
                               memory.Pending(first), publish_, memory.Gradient(first), memory.Theta(first), &norm_,
                               undo);
  };
  size_t kills = 0, torn = 0;
  while (torn < kTorn) {
    const uint64_t before = shared->completed;
    const pid_t child = ::fork();
    if (child == 0) {
      for (;;) {
        BeginUndo(shared->slot, shared->completed + 1);
        run_pass(*shared, shared->completed, &shared->slot);
        std::atomic_ref(shared->completed).fetch_add(1);
        EndUndo(shared->slot);
      }
    }
    // An emulator translates the loop anew in each child, which takes longer than many passes.
    while (std::atomic_ref(shared->completed).load() == before) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ++kills;
    const uint64_t index = shared->completed;
    if (shared->slot.claim != index + 1) continue;  // between two passes
    const size_t first = index % kRanges * kRangeElements;
    const size_t done = Undo(shared->slot, kRangeElements, shared->state(first));
    ASSERT_LT(done, kRangeElements);
    torn += done > 0;
    kernels.absorb(done, kRangeElements, shared->state(first), Constants(index / kRanges + 1, 1),
                   shared->Pending(first), &shared->slot);
    EndUndo(shared->slot);
    shared->completed = index + 1;
  }
  for (uint64_t index = 0; index < shared->completed; ++index) run_pass(*undisturbed, index, nullptr);
  EXPECT_TRUE(shared->SameState(*undisturbed, kRanges * kRangeElements));
  RecordProperty("kills", static_cast<int>(kills));
}

INSTANTIATE_TEST_SUITE_P(All, UndoSlotTest, ::testing::ValuesIn(EveryTable()), TargetName);

TEST(UndoTornGranuleTest, ASlotThatContradictsItselfUndoesNothing) {
  const Algorithm& algorithm = *Algorithms().front();
  OwnedUndoSlot slot(algorithm);
  float state[3] = {1, 2, 3};
  for (const uint64_t torn : {TornGranule(0, 2), TornGranule(2, 1), TornGranule(1, 0xffff), ~uint64_t{0}}) {
    slot->torn = torn;
    EXPECT_EQ(UndoTornGranule(*slot, 1, algorithm, {.arrays = {state, state + 1, state + 2}}), 2u);
  }
  EXPECT_EQ(state[0], 1);
}

}  // namespace
}  // namespace superoffload::kernels
