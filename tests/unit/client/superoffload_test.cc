// The C library against a daemon that errs, lies and dies.
#include "superoffload/superoffload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "superoffload/superoffload_gpu.h"
#include "tests/unit/client/fake_daemon.h"

namespace superoffload::client {
namespace {

using ::testing::HasSubstr;

enum {
  kOk = 0,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kAlreadyExists = 6,
  kFailedPrecondition = 9,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14
};

void ExpectError(int code, int expected, const std::string& part) {
  EXPECT_EQ(code, expected) << superoffload_last_error();
  EXPECT_THAT(superoffload_last_error(), HasSubstr(part));
}

superoffload_ring_entry Entry(uint16_t opcode, uint32_t index, uint64_t step, uint16_t flags = 0) {
  superoffload_ring_entry entry{};
  entry.opcode = opcode;
  entry.index = index;
  entry.step = step;
  entry.flags = flags;
  entry.attachment_epoch = kEpoch;
  return entry;
}

superoffload_ring_entry Ready(uint32_t bucket, uint64_t step, bool speculative) {
  return Entry(SUPEROFFLOAD_COMPLETE_PARAMETERS_READY, bucket, step, speculative ? SUPEROFFLOAD_FLAG_SPECULATIVE : 0);
}

superoffload_ring_entry Verdict(superoffload_verdict_kind kind, uint64_t step, bool stands) {
  return Entry(SUPEROFFLOAD_COMPLETE_VERDICT, kind, step, stands ? SUPEROFFLOAD_FLAG_SPECULATION_STANDS : 0);
}

class ConnectTest : public ::testing::Test {
 protected:
  ~ConnectTest() override {
    if (trainer_ != 0) superoffload_close_trainer(trainer_);
    superoffload_detach(attachment_);
    superoffload_disconnect(connection_);
  }
  int Connect() { return superoffload_connect(daemon_.path().c_str(), &connection_, token_); }
  int Attach() {
    EXPECT_EQ(Connect(), kOk) << superoffload_last_error();
    return superoffload_attach(connection_, kEpoch, /*last_step=*/4, kBuckets, &attachment_);
  }

  // Of as many parameters as buckets, and two groups of five scalars.
  void OpenTrainer() {
    superoffload_parameter parameters[kBuckets]{};
    superoffload_bucket buckets[kBuckets]{};
    for (uint32_t i = 0; i < kBuckets; ++i) {
      parameters[i] = {kNames[i], 8, 32 * i, 32 * i, {32 * i, 1024 + 32 * i}, 8 * i, i, 1, kFloat32, kFloat32};
      buckets[i].elements = 8;
      buckets[i].gradient_offsets[0] = 32 * i;
      buckets[i].gradient_offsets[1] = 1024 + 32 * i;
      buckets[i].state_offset = 8 * i;
    }
    const superoffload_trainer_options options{parameters, buckets, kBuckets, kBuckets, 2, 5, 1, 0};
    ASSERT_EQ(superoffload_open_trainer(&options, &trainer_), kOk) << superoffload_last_error();
    ASSERT_EQ(superoffload_use_attachment(trainer_, attachment_, 0, 0, 1, nullptr), kOk) << superoffload_last_error();
  }
  int HandOver(uint32_t parameter) {
    const float gradient[8]{};
    const superoffload_piece piece{reinterpret_cast<uint64_t>(gradient), 0, 8, parameter, kFloat32};
    superoffload_gradients gradients{};
    gradients.pieces = &piece;
    gradients.piece_count = 1;
    return superoffload_hand_over(trainer_, &gradients);
  }
  int OpenStep() {
    superoffload_gradients none{};
    none.gradient_scale = 1;
    return superoffload_hand_over(trainer_, &none);
  }
  int End(uint32_t kind = SUPEROFFLOAD_END, double gradient_scale = 1, double max_grad_norm = 0) {
    const superoffload_step_end end{gradient_scale, max_grad_norm, 0, kind, 0, nullptr};
    return superoffload_end(trainer_, &end);
  }
  int Wait(uint32_t kind, int64_t milliseconds, uint32_t bucket = 0) {
    const superoffload_awaited awaited{kind, bucket, 0};
    return superoffload_wait(trainer_, &awaited, milliseconds, &answer_);
  }

  static constexpr const char* kNames[kBuckets] = {"first", "second", "third"};
  static constexpr uint32_t kFloat32 = 3;  // DataType

  FakeDaemon daemon_;
  superoffload_connection* connection_ = nullptr;
  char token_[65] = "";
  superoffload_attachment* attachment_ = nullptr;
  int64_t trainer_ = 0;
  superoffload_answer answer_{};
};

TEST_F(ConnectTest, TheTokenIsTheDaemons) {
  ASSERT_EQ(Connect(), kOk);
  EXPECT_EQ(token_, std::string(64, 'a'));
}

TEST_F(ConnectTest, NobodyListening) {
  ExpectError(superoffload_connect("/nonexistent/socket", &connection_, token_), kUnavailable, "/nonexistent/socket");
  ExpectError(superoffload_connect(std::string(200, 'x').c_str(), &connection_, token_), kInvalidArgument,
              "longer than");
  EXPECT_EQ(connection_, nullptr);
}

TEST_F(ConnectTest, AnotherVersionIsNamed) {
  daemon_.welcome.version = SUPEROFFLOAD_WIRE_VERSION - 1;
  ExpectError(
      Connect(), kFailedPrecondition,
      "the daemon version " + std::to_string(SUPEROFFLOAD_WIRE_VERSION - 1) + "; install the same release of both");
}

TEST_F(ConnectTest, AShortReplyIsNotRead) {
  daemon_.reply_bytes = 17;
  ExpectError(Connect(), kUnimplemented, "no superoffloadd");
}

TEST_F(ConnectTest, TheDaemonsRefusalIsPassedOn) {
  daemon_.reply.kind = SUPEROFFLOAD_SOCKET_ERROR;
  daemon_.reply.code = kFailedPrecondition;
  std::memset(daemon_.reply.message, 'm', sizeof(daemon_.reply.message));  // no NUL at its end
  ExpectError(Attach(), kFailedPrecondition, "mmm");
}

TEST_F(ConnectTest, MissingDescriptors) {
  ::close(daemon_.descriptors.back());
  daemon_.descriptors.pop_back();
  ExpectError(Attach(), kInternal, "3 descriptors");
}

TEST_F(ConnectTest, AFileThatIsSmallerThanStatedIsNotMapped) {
  daemon_.reply.bytes[SUPEROFFLOAD_DESCRIPTOR_GRADIENTS] = kMemoryBytes + 1;
  ExpectError(Attach(), kInternal, "descriptor 2");
}

TEST_F(ConnectTest, RingsOfAnotherMagic) {
  daemon_.header->magic = 1;
  ExpectError(Attach(), kUnimplemented, "version 3");
}

TEST_F(ConnectTest, RingsThatReachBeyondTheirMemory) {
  daemon_.header->completion_entries = 2 * kRingEntries;
  ExpectError(Attach(), kInternal, "do not fit");
}

TEST_F(ConnectTest, RingsOfAnotherAttachment) {
  daemon_.header->attachment_epoch = kEpoch + 1;
  ExpectError(Attach(), kInternal, "attachment 10");
}

TEST_F(ConnectTest, AnAnswerThatComesTooLateIsNotTakenForThatToTheNextRequest) {
  daemon_.reply_delay = std::chrono::milliseconds(300);
  ASSERT_EQ(::setenv("SUPEROFFLOAD_CONNECT_SECONDS", "0.2", /*overwrite=*/1), 0);
  ExpectError(Attach(), kUnavailable, "does not answer");
  EXPECT_EQ(superoffload_attach(connection_, kEpoch, /*last_step=*/4, kBuckets, &attachment_), kUnavailable);
  ::unsetenv("SUPEROFFLOAD_CONNECT_SECONDS");
}

TEST_F(ConnectTest, AnAttachmentOutlivesItsConnectionAndSaysThatThatIsOver) {
  ASSERT_EQ(Attach(), kOk) << superoffload_last_error();
  superoffload_disconnect(std::exchange(connection_, nullptr));
  OpenTrainer();
  ASSERT_EQ(OpenStep(), kOk);  // the ring has room
  ASSERT_EQ(End(SUPEROFFLOAD_END_ABANDON), kOk);
  ExpectError(Wait(SUPEROFFLOAD_AWAIT_STEP, -1), kUnavailable, "gone");
}

TEST_F(ConnectTest, ThreadsShareAConnection) {
  ASSERT_EQ(Connect(), kOk);
  std::vector<std::thread> threads;
  std::atomic<int> attached{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 25; ++j) {
        superoffload_attachment* mine = nullptr;
        if (superoffload_attach(connection_, kEpoch, /*last_step=*/4, kBuckets, &mine) == kOk) ++attached;
        superoffload_detach(mine);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(attached, 100);
}

TEST_F(ConnectTest, NullHandlesAreRefused) {
  ExpectError(superoffload_gpu_copy(nullptr, SUPEROFFLOAD_TO_GPU, 0), kInvalidArgument, "NULL");
  ExpectError(superoffload_attach(nullptr, 0, 0, 0, &attachment_), kInvalidArgument, "NULL");
  void* data = nullptr;
  size_t bytes = 0;
  ExpectError(superoffload_memory(nullptr, SUPEROFFLOAD_REGION_STATE, &data, &bytes), kInvalidArgument, "NULL");
  ExpectError(superoffload_connect(daemon_.path().c_str(), &connection_, nullptr), kInvalidArgument, "NULL");
}

TEST_F(ConnectTest, ItsMemoryIsThatOfTheDaemon) {
  ASSERT_EQ(Attach(), kOk) << superoffload_last_error();
  void* data[3] = {};
  size_t bytes = 0;
  for (uint32_t region = SUPEROFFLOAD_REGION_PARAMETERS; region <= SUPEROFFLOAD_REGION_STATE; ++region) {
    ASSERT_EQ(superoffload_memory(attachment_, region, &data[region], &bytes), kOk) << superoffload_last_error();
    EXPECT_EQ(bytes, kMemoryBytes);
  }
  EXPECT_NE(data[0], data[1]);
  EXPECT_NE(data[1], data[2]);
  ExpectError(superoffload_memory(attachment_, SUPEROFFLOAD_REGION_STATE + 1, &data[0], &bytes), kInvalidArgument,
              "region 3");
}

TEST_F(ConnectTest, StepsThatCannotBeCountedAreRefused) {
  ASSERT_EQ(Connect(), kOk);
  ASSERT_EQ(superoffload_attach(connection_, kEpoch, ~uint64_t{0}, kBuckets, &attachment_), kOk)
      << superoffload_last_error();
  OpenTrainer();
  ExpectError(OpenStep(), kFailedPrecondition, "the last that can be counted");
}

// Attached to an optimizer that is at step 4.
class StepTest : public ConnectTest {
 protected:
  StepTest() {
    EXPECT_EQ(Attach(), kOk) << superoffload_last_error();
    OpenTrainer();
  }

  void EndStep() {
    for (uint32_t parameter = 0; parameter < kBuckets; ++parameter) EXPECT_EQ(HandOver(parameter), kOk);
    EXPECT_EQ(End(), kOk);
  }
  int Poll() { return Wait(SUPEROFFLOAD_AWAIT_STEP, 0); }
};

constexpr double kScalars[] = {0.5, 0.9, 0.99, 1e-8, 0.1};

TEST_F(StepTest, ScalarsThatDoNotFitOneEntryTakeMore) {
  ASSERT_EQ(superoffload_set_scalars(trainer_, 1, kScalars, 5), kOk);
  ASSERT_EQ(OpenStep(), kOk);
  const auto submitted = daemon_.TakeSubmissions();
  ASSERT_EQ(submitted.size(), 3u);
  EXPECT_EQ(submitted[0].payload.group.count, 4u);
  EXPECT_EQ(submitted[0].payload.group.values[3], 1e-8);
  EXPECT_EQ(submitted[1].payload.group.first, 4u);
  EXPECT_EQ(submitted[1].payload.group.count, 1u);
  EXPECT_EQ(submitted[1].payload.group.values[0], 0.1);
}

TEST_F(StepTest, AStepIsSubmittedInOrder) {
  ASSERT_EQ(superoffload_set_scalars(trainer_, 1, kScalars, 5), kOk);
  EndStep();
  const auto submitted = daemon_.TakeSubmissions();
  std::vector<uint16_t> opcodes;
  for (const auto& entry : submitted) {
    opcodes.push_back(entry.opcode);
    EXPECT_EQ(entry.attachment_epoch, kEpoch);
  }
  EXPECT_THAT(opcodes, ::testing::ElementsAre(SUPEROFFLOAD_SUBMIT_GROUP, SUPEROFFLOAD_SUBMIT_GROUP,
                                              SUPEROFFLOAD_SUBMIT_BEGIN_STEP, SUPEROFFLOAD_SUBMIT_GRADIENT_READY,
                                              SUPEROFFLOAD_SUBMIT_GRADIENT_READY, SUPEROFFLOAD_SUBMIT_GRADIENT_READY,
                                              SUPEROFFLOAD_SUBMIT_END_STEP));
  EXPECT_EQ(submitted.back().step, 5u);
}

TEST_F(StepTest, MisuseIsRefusedBeforeTheDaemonHearsOfIt) {
  ExpectError(Poll(), kFailedPrecondition, "nothing");
  ASSERT_EQ(OpenStep(), kOk);
  ExpectError(OpenStep(), kFailedPrecondition, "a step is open");
  for (uint32_t parameter = 0; parameter < kBuckets; ++parameter) EXPECT_EQ(HandOver(parameter), kOk);
  EXPECT_EQ(daemon_.TakeSubmissions().size(), 1 + kBuckets);
  ExpectError(End(SUPEROFFLOAD_END, 0), kInvalidArgument, "scale");
  ExpectError(End(SUPEROFFLOAD_END, 1, -1), kInvalidArgument, "max_grad_norm");
  ExpectError(End(SUPEROFFLOAD_END_PREPARED), kFailedPrecondition, "not prepared");
  ExpectError(End(SUPEROFFLOAD_END_MEASURE + 1), kInvalidArgument, "unknown end");
  EXPECT_EQ(daemon_.TakeSubmissions().size(), 0u);
  EXPECT_EQ(End(), kOk) << "it is still open";
}

TEST_F(StepTest, ParametersAreFinalWhenSpeculationStands) {
  EndStep();
  daemon_.Complete(Ready(0, 5, /*speculative=*/true));
  daemon_.Complete(Ready(1, 5, true));
  EXPECT_EQ(Poll(), kDeadlineExceeded);
  daemon_.Complete(Verdict(SUPEROFFLOAD_VERDICT_COMMIT, 5, /*stands=*/true));
  EXPECT_EQ(Wait(SUPEROFFLOAD_AWAIT_BUCKET, 0, 0), kOk);
  EXPECT_EQ(Wait(SUPEROFFLOAD_AWAIT_BUCKET, 0, 2), kDeadlineExceeded);
  EXPECT_EQ(Wait(SUPEROFFLOAD_AWAIT_BUCKET, 0, kBuckets), kInvalidArgument);
  EXPECT_EQ(Wait(SUPEROFFLOAD_AWAIT_VERDICT, 0), kOk);
  EXPECT_EQ(Poll(), kDeadlineExceeded);
  daemon_.Complete(Ready(2, 5, /*speculative=*/false));
  EXPECT_EQ(Poll(), kOk);
  EXPECT_EQ(answer_.verdict.step, 5u);
}

TEST_F(StepTest, ParametersAreReceivedAsTheyBecomeFinal) {
  EndStep();
  const std::string published[kBuckets] = {"zero", "one", "two"};
  std::string model[kBuckets] = {"0000", "111", "222"};
  superoffload_range ranges[kBuckets];
  for (uint32_t i = 0; i < kBuckets; ++i) ranges[i] = {published[i].data(), model[i].data(), model[i].size()};
  ranges[1].to = nullptr;
  uint64_t digests[kBuckets] = {}, expected[kBuckets];
  ASSERT_EQ(superoffload_copy_and_digest(ranges, 2, 1, expected), kOk);
  model[0] = "0000";
  ranges[0].to = model[0].data();
  uint8_t received[kBuckets] = {};
  const auto receive = [&] { return superoffload_receive(trainer_, ranges, 0, digests, received); };
  daemon_.Complete(Ready(0, 5, /*speculative=*/true));
  EXPECT_EQ(receive(), kDeadlineExceeded) << "the verdict may refute it";
  EXPECT_EQ(model[0], "0000");
  daemon_.Complete(Verdict(SUPEROFFLOAD_VERDICT_COMMIT, 5, /*stands=*/true));
  daemon_.Complete(Ready(1, 5, false));
  EXPECT_EQ(receive(), kDeadlineExceeded);
  EXPECT_THAT(received, ::testing::ElementsAre(1, 1, 0));
  EXPECT_THAT(model, ::testing::ElementsAre("zero", "111", "222"));
  EXPECT_EQ(digests[0], expected[0]);
  EXPECT_EQ(digests[1], expected[1]);
  model[0] = "mine";
  daemon_.Complete(Ready(2, 5, false));
  EXPECT_EQ(receive(), kOk);
  EXPECT_THAT(model, ::testing::ElementsAre("mine", "111", "two"));
  EXPECT_EQ(superoffload_receive(trainer_, nullptr, 0, digests, received), kInvalidArgument);
}

TEST_F(StepTest, AnAttachmentWithoutAGpuHasNothingToWaitForThere) {
  ExpectError(Wait(SUPEROFFLOAD_AWAIT_BUCKET_ON_GPU, 0), kFailedPrecondition, "superoffload_gpu_attach first");
  superoffload_answer* const none = nullptr;
  const superoffload_awaited step{SUPEROFFLOAD_AWAIT_STEP, 0, 0};
  ExpectError(superoffload_wait(trainer_, &step, 0, none), kInvalidArgument, "NULL");
}

TEST_F(StepTest, RefutedSpeculationWaitsForTheSecondPublication) {
  EndStep();
  for (uint32_t bucket = 0; bucket < kBuckets; ++bucket) daemon_.Complete(Ready(bucket, 5, true));
  daemon_.Complete(Verdict(SUPEROFFLOAD_VERDICT_CLIP, 5, /*stands=*/false));
  for (uint32_t bucket = 0; bucket < kBuckets; ++bucket) {
    EXPECT_EQ(Poll(), kDeadlineExceeded);
    daemon_.Complete(Ready(bucket, 5, false));
  }
  EXPECT_EQ(Poll(), kOk);
}

TEST_F(StepTest, ASkippedStepLeavesUnspeculatedBucketsAsTheyWere) {
  EndStep();
  daemon_.Complete(Ready(1, 5, true));
  daemon_.Complete(Verdict(SUPEROFFLOAD_VERDICT_SKIP_NON_FINITE, 5, false));
  EXPECT_EQ(Wait(SUPEROFFLOAD_AWAIT_BUCKET, 0, 0), kOk);
  EXPECT_EQ(Poll(), kDeadlineExceeded);
  daemon_.Complete(Ready(1, 5, false));
  EXPECT_EQ(Poll(), kOk);
}

TEST_F(StepTest, ErrorsOfTheDaemonSurfaceOnce) {
  EndStep();
  std::strcpy(daemon_.header->error_text, "bucket 7 is unwell; feed it");
  daemon_.Complete(Entry(SUPEROFFLOAD_COMPLETE_ERROR, kInvalidArgument, 5));
  ExpectError(Poll(), kInvalidArgument, "feed it");
  EXPECT_EQ(Poll(), kDeadlineExceeded);
}

TEST_F(StepTest, CompletionsOutOfRangeAreIgnored) {
  EndStep();
  daemon_.Complete(Ready(kBuckets, 5, false));
  daemon_.Complete(Ready(0xffffffff, 5, true));
  daemon_.Complete(Entry(999, 0, 5));
  EXPECT_EQ(Poll(), kDeadlineExceeded);
}

TEST_F(StepTest, TheNormArrivesBeforeTheEnd) {
  for (uint32_t parameter = 0; parameter < kBuckets; ++parameter) EXPECT_EQ(HandOver(parameter), kOk);
  ASSERT_EQ(End(SUPEROFFLOAD_END_MEASURE), kOk);
  EXPECT_EQ(Wait(SUPEROFFLOAD_AWAIT_NORM, 1), kDeadlineExceeded);
  auto answer = Entry(SUPEROFFLOAD_COMPLETE_GRADIENT_NORM, 0, 5);
  answer.payload.f64[0] = 2.5;
  daemon_.Complete(answer);
  EXPECT_EQ(Wait(SUPEROFFLOAD_AWAIT_NORM, 0), kOk);
  EXPECT_EQ(answer_.norm, 2.5);
  EXPECT_EQ(Wait(SUPEROFFLOAD_AWAIT_BUCKET_ON_GPU + 1, 0), kInvalidArgument);
}

TEST_F(StepTest, ADaemonThatDiesIsNoticedWhileWaiting) {
  EndStep();
  std::thread killer([this] { daemon_.Die(); });
  ExpectError(Wait(SUPEROFFLOAD_AWAIT_STEP, -1), kUnavailable, "gone");
  killer.join();
}

TEST_F(StepTest, ACompletionBeforeTheDeathIsNotLost) {
  EndStep();
  daemon_.Complete(Verdict(SUPEROFFLOAD_VERDICT_COMMIT, 5, true));
  for (uint32_t bucket = 0; bucket < kBuckets; ++bucket) daemon_.Complete(Ready(bucket, 5, false));
  daemon_.Die();
  EXPECT_EQ(Wait(SUPEROFFLOAD_AWAIT_STEP, -1), kOk);
}

TEST_F(StepTest, AnAttachmentThatTheDaemonEndedSaysWhy) {
  std::strcpy(daemon_.header->error_text, "the lease has ended; attach again");
  daemon_.header->closed = 1;
  ExpectError(OpenStep(), kUnavailable, "lease");
  ExpectError(HandOver(0), kUnavailable, "lease");
}

TEST_F(StepTest, AFullRingWaitsForTheDaemonOrItsDeath) {
  ASSERT_EQ(OpenStep(), kOk);
  double scalars[5]{};
  const auto submit = [&] {  // two entries
    ++scalars[0];
    return superoffload_set_scalars(trainer_, 0, scalars, 5);
  };
  for (uint32_t i = 0; i < (kRingEntries - 1) / 2; ++i) ASSERT_EQ(submit(), kOk);
  std::thread killer([this] { daemon_.Die(); });
  ExpectError(submit(), kUnavailable, "gone");
  killer.join();
}

}  // namespace
}  // namespace superoffload::client
