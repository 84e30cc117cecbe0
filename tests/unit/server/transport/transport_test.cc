// The daemon's side of the rings, driven through the shared memory as a trainer would, good and bad.
#include "server/transport/transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"

namespace superoffload::transport {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kEpoch = 77;

class RecordingHandler final : public StepHandler {
 public:
  absl::Status SetScalars(uint32_t group, uint32_t first, std::span<const double> values) override {
    std::string text;
    for (const double value : values) text += " " + std::to_string(value);
    return Record("group " + std::to_string(group) + " from " + std::to_string(first) + text);
  }
  absl::Status ParametersAbsent(uint64_t step, uint32_t first, uint32_t count) override {
    return Record("absent " + std::to_string(step) + " " + std::to_string(first) + " " + std::to_string(count));
  }
  absl::Status BeginStep(uint64_t step, double) override { return Record("begin " + std::to_string(step)); }
  absl::Status GradientReady(uint64_t, uint32_t bucket, std::optional<double>, engine::Landing landing) override {
    if (bucket == 13) return absl::InvalidArgumentError("bucket 13 brings bad luck; skip it");
    static const std::map<engine::Landing, std::string> kWords = {{engine::Landing::kSlot, "ready "},
                                                                  {engine::Landing::kLog, "logged "},
                                                                  {engine::Landing::kSlotStillRead, "still read "}};
    return Record(kWords.at(landing) + std::to_string(bucket));
  }
  absl::Status EndStep(uint64_t step, double, double, uint64_t streamed_bytes) override {
    return Record("end " + std::to_string(step) + " streamed " + std::to_string(streamed_bytes));
  }
  absl::Status PrepareStep(uint64_t step, double, double) override { return Record("prepare " + std::to_string(step)); }
  absl::Status EndPreparedStep(uint64_t step, double, double, const engine::RunTotal& total) override {
    return Record("end " + std::to_string(step) + " attempt " + std::to_string(total.attempt) + " total " +
                  std::to_string(total.sum_of_squares));
  }
  absl::Status MeasureNorm(uint64_t step, double scale) override {
    return Record("measure " + std::to_string(step) + " " + std::to_string(scale));
  }
  absl::Status AbandonStep(uint64_t step) override { return Record("abandon " + std::to_string(step)); }

  std::vector<std::string> WaitFor(size_t calls) {
    absl::MutexLock lock(&mu_);
    auto enough = [&] {
      mu_.AssertHeld();
      return calls_.size() >= calls;
    };
    mu_.Await(absl::Condition(&enough));
    return calls_;
  }

 private:
  absl::Status Record(std::string call) {
    absl::MutexLock lock(&mu_);
    calls_.push_back(std::move(call));
    return absl::OkStatus();
  }

  absl::Mutex mu_;
  std::vector<std::string> calls_ ABSL_GUARDED_BY(mu_);
};

// The trainer's half of the protocol, over the same mapping.
class TransportTest : public ::testing::Test {
 protected:
  TransportTest()
      : transport_(*RingMemory::Create(kEpoch, 4, 2), kEpoch, &handler_, [this](const absl::Status& status) {
          end_status_ = status;
          ended_.Notify();
        }) {
    header_ = reinterpret_cast<superoffload_ring_header*>(transport_.ring_memory().data());
    EXPECT_TRUE(transport_.Start().ok());
  }
  ~TransportTest() override { transport_.RequestEnd(absl::CancelledError("the test is over")); }

  void Submit(superoffload_ring_entry entry) {
    auto* entries =
        reinterpret_cast<superoffload_ring_entry*>(transport_.ring_memory().data() + header_->submission_offset);
    const uint32_t tail = header_->submission_tail;
    while (tail - std::atomic_ref(header_->submission_head).load() == header_->submission_entries) {
      std::this_thread::yield();
    }
    entries[tail & (header_->submission_entries - 1)] = entry;
    PublishTail(tail + 1);
  }

  void PublishTail(uint32_t tail) {
    std::atomic_ref(header_->submission_tail).store(tail);
    if (std::atomic_ref(header_->submission_waiting).load() != 0) {
      ::syscall(SYS_futex, &header_->submission_tail, 1 /* FUTEX_WAKE */, 1, nullptr, nullptr, 0);
    }
  }

  static superoffload_ring_entry Entry(uint16_t opcode, uint32_t index, uint64_t epoch = kEpoch) {
    superoffload_ring_entry entry{};
    entry.opcode = opcode;
    entry.index = index;
    entry.step = 1;
    entry.attachment_epoch = epoch;
    return entry;
  }

  superoffload_ring_entry WaitCompletion() {
    const auto* entries =
        reinterpret_cast<superoffload_ring_entry*>(transport_.ring_memory().data() + header_->completion_offset);
    const uint32_t head = header_->completion_head;
    while (std::atomic_ref(header_->completion_tail).load() == head) std::this_thread::yield();
    const superoffload_ring_entry entry = entries[head & (header_->completion_entries - 1)];
    std::atomic_ref(header_->completion_head).store(head + 1);
    return entry;
  }

  RecordingHandler handler_;
  absl::Status end_status_;
  absl::Notification ended_;
  Transport transport_;
  superoffload_ring_header* header_;
};

TEST_F(TransportTest, CarriesAStepInOrder) {
  superoffload_ring_entry group = Entry(SUPEROFFLOAD_SUBMIT_GROUP, 1);
  group.payload.group = {.first = 3, .count = 2, .values = {0.5, 2}};
  Submit(group);
  Submit(Entry(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 0));
  superoffload_ring_entry absent = Entry(SUPEROFFLOAD_SUBMIT_ABSENT, 7);
  absent.payload.absent.count = 3;
  Submit(absent);
  Submit(Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 2));
  superoffload_ring_entry logged = Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 3);
  logged.flags = SUPEROFFLOAD_FLAG_LOGGED;
  Submit(logged);
  superoffload_ring_entry still_read = Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 4);
  still_read.flags = SUPEROFFLOAD_FLAG_STILL_READ;
  Submit(still_read);
  superoffload_ring_entry end = Entry(SUPEROFFLOAD_SUBMIT_END_STEP, 0);
  end.payload.end.streamed_bytes = 40;
  Submit(end);
  Submit(Entry(SUPEROFFLOAD_SUBMIT_ABANDON_STEP, 0));
  EXPECT_THAT(handler_.WaitFor(8), ElementsAre("group 1 from 3 0.500000 2.000000", "begin 1", "absent 1 7 3", "ready 2",
                                               "logged 3", "still read 4", "end 1 streamed 40", "abandon 1"));
}

TEST_F(TransportTest, WhatNoClientSubmitsIsRejected) {
  superoffload_ring_entry group = Entry(SUPEROFFLOAD_SUBMIT_GROUP, 0);
  for (const uint32_t count : {0u, SUPEROFFLOAD_GROUP_SCALARS + 1, 0xffffffffu}) {
    group.payload.group.count = count;
    Submit(group);
    const superoffload_ring_entry answer = WaitCompletion();
    EXPECT_EQ(answer.opcode, SUPEROFFLOAD_COMPLETE_ERROR);
    EXPECT_EQ(answer.index, static_cast<uint32_t>(absl::StatusCode::kInvalidArgument));
  }
}

TEST_F(TransportTest, CarriesAStepOfSeveralRanks) {
  Submit(Entry(SUPEROFFLOAD_SUBMIT_PREPARE, 0));
  superoffload_ring_entry end = Entry(SUPEROFFLOAD_SUBMIT_END_STEP, 0);
  end.payload.end = {
      .gradient_scale = 1, .max_grad_norm = 2, .total_sum_of_squares = 3, .attempt = 9, .streamed_bytes = 0};
  Submit(end);
  EXPECT_THAT(handler_.WaitFor(2), ElementsAre("prepare 1", "end 1 attempt 9 total 3.000000"));
  transport_.Prepared(1, 9, 0.5);
  const superoffload_ring_entry entry = WaitCompletion();
  EXPECT_EQ(entry.opcode, SUPEROFFLOAD_COMPLETE_PREPARED);
  EXPECT_EQ(entry.payload.prepared.attempt, 9u);
  EXPECT_EQ(entry.payload.prepared.sum_of_squares, 0.5);
}

TEST_F(TransportTest, CarriesCompletions) {
  transport_.SlotFree(4, 1, 1);
  transport_.ParametersReady(4, 2, /*speculative=*/true);
  transport_.VerdictReached({.verdict = engine::Verdict::kClip,
                             .step = 4,
                             .global_norm = 2,
                             .clip_coefficient = 0.5,
                             .committed_steps = 3,
                             .next_slot = 1,
                             .speculation_stands = true});
  superoffload_ring_entry entry = WaitCompletion();
  EXPECT_EQ(entry.opcode, SUPEROFFLOAD_COMPLETE_SLOT_FREE);
  EXPECT_EQ(entry.payload.gradient.slot, 1u);
  EXPECT_EQ(entry.index, 1u);
  EXPECT_EQ(entry.attachment_epoch, kEpoch);
  entry = WaitCompletion();
  EXPECT_EQ(entry.opcode, SUPEROFFLOAD_COMPLETE_PARAMETERS_READY);
  EXPECT_EQ(entry.flags, SUPEROFFLOAD_FLAG_SPECULATIVE);
  entry = WaitCompletion();
  EXPECT_EQ(entry.opcode, SUPEROFFLOAD_COMPLETE_VERDICT);
  EXPECT_EQ(entry.index, static_cast<uint32_t>(SUPEROFFLOAD_VERDICT_CLIP));
  EXPECT_EQ(entry.flags, SUPEROFFLOAD_FLAG_SPECULATION_STANDS);
  EXPECT_EQ(entry.payload.verdict.clip_coefficient, 0.5);
  EXPECT_EQ(entry.payload.verdict.next_slot, 1u);
}

TEST_F(TransportTest, ThousandsOfEntriesWrapAround) {
  std::thread producer([&] {
    for (int i = 0; i < 5000; ++i) Submit(Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 100 + i));
  });
  const std::vector<std::string> calls = handler_.WaitFor(5000);
  producer.join();
  for (int i = 0; i < 5000; ++i) ASSERT_EQ(calls[i], "ready " + std::to_string(100 + i));
}

TEST_F(TransportTest, ARejectedEntryIsAnsweredAndTheNextIsServed) {
  Submit(Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 13));
  const superoffload_ring_entry entry = WaitCompletion();
  EXPECT_EQ(entry.opcode, SUPEROFFLOAD_COMPLETE_ERROR);
  EXPECT_EQ(entry.index, static_cast<uint32_t>(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(header_->error_text, HasSubstr("bad luck"));
  Submit(Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 2));
  EXPECT_THAT(handler_.WaitFor(1), ElementsAre("ready 2"));
}

TEST_F(TransportTest, AStaleEpochAndAnUnknownOpcodeAreErrors) {
  Submit(Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 2, kEpoch - 1));
  EXPECT_EQ(WaitCompletion().index, static_cast<uint32_t>(absl::StatusCode::kFailedPrecondition));
  Submit(Entry(999, 2));
  EXPECT_EQ(WaitCompletion().index, static_cast<uint32_t>(absl::StatusCode::kUnimplemented));
}

TEST_F(TransportTest, AnImpossibleTailEndsTheAttachment) {
  PublishTail(header_->submission_tail + header_->submission_entries + 1);
  ended_.WaitForNotification();
  EXPECT_EQ(end_status_.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(header_->closed, 1u);
  EXPECT_THAT(header_->error_text, HasSubstr("corrupted"));
}

TEST_F(TransportTest, ATrainerThatNeverConsumesEndsTheAttachment) {
  for (uint32_t i = 0; i <= header_->completion_entries; ++i) transport_.SlotFree(1, i, 0);
  ended_.WaitForNotification();
  EXPECT_EQ(end_status_.code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(TransportTest, GarbageNeverReachesTheHandlerUnchecked) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 2000; ++i) {
    superoffload_ring_entry entry;
    auto* words = reinterpret_cast<uint64_t*>(&entry);
    for (size_t w = 0; w < sizeof(entry) / 8; ++w) words[w] = random();
    entry.attachment_epoch |= uint64_t{1} << 40;  // never the right one
    Submit(entry);
    EXPECT_EQ(WaitCompletion().opcode, SUPEROFFLOAD_COMPLETE_ERROR);
  }
}

TEST_F(TransportTest, EndsOnRequestWhileAsleep) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  transport_.RequestEnd(absl::CancelledError("enough"));
  ended_.WaitForNotification();
  EXPECT_EQ(end_status_.message(), "enough");
}

}  // namespace
}  // namespace superoffload::transport
