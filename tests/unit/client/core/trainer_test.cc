// Steps in terms of parameters, through the C interface, with daemons that a test plays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "superoffload/superoffload.h"
#include "tests/unit/client/fake_daemon.h"

namespace superoffload::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr uint64_t kSlotBytes = 2048;
constexpr uint32_t kFloat32 = 3;  // DataType
constexpr int kOk = 0, kInvalidArgument = 3, kFailedPrecondition = 9, kUnimplemented = 12, kUnavailable = 14;

// An attachment to a daemon of its own.
struct Attached {
  explicit Attached(uint64_t last_step = 4) {
    EXPECT_EQ(superoffload_connect(daemon.path().c_str(), &connection, token), kOk);
    EXPECT_EQ(superoffload_attach(connection, kEpoch, last_step, kBuckets, &attachment), kOk);
  }
  ~Attached() {
    superoffload_detach(attachment);
    superoffload_disconnect(connection);
  }

  // Opcodes and indices.
  std::vector<std::pair<int, int>> Submissions() {
    std::vector<std::pair<int, int>> found;
    for (const superoffload_ring_entry& entry : daemon.TakeSubmissions()) found.emplace_back(entry.opcode, entry.index);
    return found;
  }
  const char* slot(uint32_t slot) const {
    void* data = nullptr;
    size_t bytes = 0;
    EXPECT_EQ(superoffload_memory(attachment, SUPEROFFLOAD_REGION_GRADIENTS, &data, &bytes), kOk);
    return static_cast<const char*>(data) + slot * kSlotBytes;
  }

  FakeDaemon daemon;
  superoffload_connection* connection = nullptr;
  char token[65];
  superoffload_attachment* attachment = nullptr;
};

// Buckets of 100, 60 and 40 elements, one after the other; "first" is in buckets 0 and 1, "second" in 1 and 2.
class TrainerTest : public ::testing::Test {
 protected:
  TrainerTest() {
    EXPECT_EQ(Open(), kOk) << superoffload_last_error();
    const double scalars[] = {0.5, 0.25};
    EXPECT_EQ(superoffload_set_scalars(trainer_, 0, scalars, 2), kOk);
    EXPECT_EQ(Use(first_, /*next_slot=*/1, /*committed_steps=*/3), SUPEROFFLOAD_RESUMED_NOTHING);
    EXPECT_THAT(first_.Submissions(), ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_GROUP, 0)));
    std::iota(gradient_.begin(), gradient_.end(), 1.0f);
  }
  ~TrainerTest() override { superoffload_close_trainer(trainer_); }

  int Open(uint64_t slot_bytes = kSlotBytes) {
    const superoffload_parameter parameters[] = {
        {"first", 120, 0, 0, {0, slot_bytes}, 0, 0, 2, kFloat32, kFloat32},
        {"second", 80, 480, 480, {480, slot_bytes + 480}, 120, 1, 2, kFloat32, kFloat32}};
    superoffload_bucket buckets[kBuckets]{};
    uint64_t first = 0;
    for (auto [bucket, elements] : {std::pair{0, 100}, {1, 60}, {2, 40}}) {
      buckets[bucket].elements = elements;
      buckets[bucket].gradient_offsets[0] = 4 * first;
      buckets[bucket].gradient_offsets[1] = slot_bytes + 4 * first;
      buckets[bucket].state_offset = first;
      first += elements;
    }
    const superoffload_trainer_options options{parameters, buckets, 2, kBuckets, 1, 2, 1, 0};
    return superoffload_open_trainer(&options, &trainer_);
  }

  uint32_t Use(Attached& attached, uint32_t next_slot, uint64_t committed_steps, bool resumes = true) {
    uint32_t resumed = ~0u;
    EXPECT_EQ(superoffload_use_attachment(trainer_, attached.attachment, next_slot, committed_steps, resumes, &resumed),
              kOk)
        << superoffload_last_error();
    return resumed;
  }

  // An attachment that lives until the trainer is closed.
  Attached& Succeed(uint64_t last_step = 4) { return *successors_.emplace_back(std::make_unique<Attached>(last_step)); }

  int HandOver(uint32_t parameter, uint64_t first, uint64_t elements, std::vector<uint32_t>* left = nullptr) {
    const superoffload_piece piece{reinterpret_cast<uint64_t>(gradient_.data() + first), first, elements, parameter,
                                   kFloat32};
    return HandOver(Of({&piece, 1}), left);
  }

  int HandOver(superoffload_gradients gradients, std::vector<uint32_t>* left = nullptr) {
    uint32_t gone[2];
    gradients.left = gone;
    const int code = superoffload_hand_over(trainer_, &gradients);
    if (left != nullptr) left->assign(gone, gone + gradients.left_count);
    return code;
  }

  static superoffload_gradients Of(std::span<const superoffload_piece> pieces, double gradient_scale = 0) {
    superoffload_gradients gradients{};
    gradients.pieces = pieces.data();
    gradients.piece_count = static_cast<uint32_t>(pieces.size());
    gradients.gradient_scale = gradient_scale;
    return gradients;
  }

  int SetAbsent(uint32_t parameter) {
    superoffload_gradients gradients{};
    gradients.absent = &parameter;
    gradients.absent_count = 1;
    return HandOver(gradients);
  }

  int End(uint32_t kind = SUPEROFFLOAD_END) {
    const superoffload_step_end end{1, 0, 0, kind, 0, nullptr};
    return superoffload_end(trainer_, &end);
  }

  int Wait(uint32_t kind, superoffload_answer* answer, int64_t timeout_milliseconds = 5000) {
    const superoffload_awaited awaited{kind, 0, 0};
    return superoffload_wait(trainer_, &awaited, timeout_milliseconds, answer);
  }

  superoffload_open_step_state Look() const {
    superoffload_open_step_state step;
    EXPECT_EQ(superoffload_look(trainer_, &step, nullptr), kOk);
    return step;
  }

  std::vector<uint64_t> Arrived(int expected = kOk) const {
    superoffload_open_step_state step;
    std::vector<uint64_t> arrived(2);
    EXPECT_EQ(superoffload_look(trainer_, &step, arrived.data()), expected);
    return arrived;
  }

  void ExpectGradients(const Attached& attached, uint32_t slot) const {
    EXPECT_EQ(std::memcmp(attached.slot(slot), gradient_.data(), 480), 0);
    EXPECT_EQ(std::memcmp(attached.slot(slot) + 480, gradient_.data(), 320), 0);
  }

  Attached first_;
  std::vector<std::unique_ptr<Attached>> successors_;
  int64_t trainer_ = 0;
  std::vector<float> gradient_ = std::vector<float>(200);
};

TEST_F(TrainerTest, TheFirstPieceBeginsTheStepAndABucketIsSubmittedWithItsLastOne) {
  std::vector<uint32_t> left;
  ASSERT_EQ(HandOver(1, 40, 40, &left), kOk) << superoffload_last_error();
  EXPECT_THAT(left, IsEmpty());
  EXPECT_THAT(first_.Submissions(),
              ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 0), Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 2)));
  ASSERT_EQ(HandOver(0, 0, 120, &left), kOk);
  EXPECT_THAT(left, IsEmpty()) << "the end of \"first\" waits for the beginning of \"second\"";
  EXPECT_THAT(first_.Submissions(), ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 0)));
  ASSERT_EQ(HandOver(1, 0, 40, &left), kOk);
  EXPECT_THAT(left, ElementsAre(0, 1));
  EXPECT_THAT(first_.Submissions(), ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1)));
  ExpectGradients(first_, 1);
  EXPECT_THAT(Arrived(), ElementsAre(120, 80));
}

TEST_F(TrainerTest, PiecesThatComeTogetherAreDigestedAsByThemselves) {
  const uint64_t data = reinterpret_cast<uint64_t>(gradient_.data());
  const superoffload_piece pieces[] = {{data, 0, 120, 0, kFloat32}, {data, 0, 80, 1, kFloat32}};
  uint64_t digests[2], expected[2];
  superoffload_gradients gradients = Of(pieces);
  gradients.digests = digests;
  ASSERT_EQ(HandOver(gradients), kOk) << superoffload_last_error();
  const superoffload_range ranges[] = {{gradient_.data(), nullptr, 480}, {gradient_.data(), nullptr, 320}};
  ASSERT_EQ(superoffload_copy_and_digest(ranges, 2, 1, expected), kOk);
  EXPECT_THAT(digests, ElementsAre(expected[0], expected[1]));
  ExpectGradients(first_, 1);
}

TEST_F(TrainerTest, AnEditOfAGradientThatWasHandedOverIsFound) {
  ASSERT_EQ(HandOver(0, 0, 120), kOk);
  std::vector<float> edited = gradient_;
  const superoffload_piece piece{reinterpret_cast<uint64_t>(edited.data()), 0, 120, 0, kFloat32};
  uint32_t index = 7;
  ASSERT_EQ(superoffload_find_edited(trainer_, &piece, 1, &index), kOk) << superoffload_last_error();
  EXPECT_EQ(index, 1u);
  edited[119] = -edited[119];
  ASSERT_EQ(superoffload_find_edited(trainer_, &piece, 1, &index), kOk);
  EXPECT_EQ(index, 0u);
  const superoffload_piece other{reinterpret_cast<uint64_t>(edited.data()), 0, 80, 1, kFloat32};
  EXPECT_EQ(superoffload_find_edited(trainer_, &other, 1, &index), kInvalidArgument);
}

TEST_F(TrainerTest, AGradientThatIsInItsSlotAlreadyIsNotCopied) {
  char* const slot = const_cast<char*>(first_.slot(1));
  std::memcpy(slot, gradient_.data(), 480);
  const superoffload_piece piece{reinterpret_cast<uint64_t>(slot), 0, 120, 0, kFloat32};
  ASSERT_EQ(HandOver(Of({&piece, 1})), kOk);
  EXPECT_EQ(std::memcmp(slot, gradient_.data(), 480), 0);
}

TEST_F(TrainerTest, AnAbsentParameterIsSaidBeforeItsBucketsAndIsNotAmongThoseThatLeft) {
  ASSERT_EQ(SetAbsent(0), kOk) << superoffload_last_error();
  EXPECT_THAT(first_.Submissions(),
              ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 0), Pair(SUPEROFFLOAD_SUBMIT_ABSENT, 0),
                          Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 0)));
  EXPECT_EQ(SetAbsent(0), kFailedPrecondition);
  EXPECT_EQ(HandOver(0, 0, 1), kFailedPrecondition);
  std::vector<uint32_t> left;
  ASSERT_EQ(HandOver(1, 0, 80, &left), kOk);
  EXPECT_THAT(left, ElementsAre(1));
}

TEST_F(TrainerTest, GradientsAndParametersWithoutOneComeInOneCallWhichOpensTheStep) {
  const superoffload_piece piece{reinterpret_cast<uint64_t>(gradient_.data()), 0, 80, 1, kFloat32};
  const uint32_t absent[] = {0};
  superoffload_gradients gradients = Of({&piece, 1}, /*gradient_scale=*/0.25);
  gradients.absent = absent;
  gradients.absent_count = 1;
  std::vector<uint32_t> left;
  ASSERT_EQ(HandOver(gradients, &left), kOk) << superoffload_last_error();
  EXPECT_THAT(left, ElementsAre(1));
  const std::vector<superoffload_ring_entry> entries = first_.daemon.TakeSubmissions();
  ASSERT_EQ(entries.size(), 5u);
  EXPECT_EQ(entries[0].payload.f64[0], 0.25);
  EXPECT_EQ(entries[1].opcode, SUPEROFFLOAD_SUBMIT_ABSENT);
  EXPECT_EQ(HandOver(Of({}, 0.25)), kFailedPrecondition);
  EXPECT_THAT(superoffload_last_error(), HasSubstr("a step is open"));
  EXPECT_EQ(End(), kOk);
}

TEST_F(TrainerTest, WhatComesTwiceInOneCallIsRefused) {
  const superoffload_piece piece{reinterpret_cast<uint64_t>(gradient_.data()), 0, 120, 0, kFloat32};
  const superoffload_piece twice[] = {piece, piece};
  EXPECT_EQ(HandOver(Of(twice)), kFailedPrecondition);
  EXPECT_THAT(superoffload_last_error(), HasSubstr("the gradient of first came twice"));
  EXPECT_THAT(Arrived(), ElementsAre(120, 0));
  const uint32_t absent[] = {1, 1};
  superoffload_gradients gradients{};
  gradients.absent = absent;
  gradients.absent_count = 2;
  EXPECT_EQ(HandOver(gradients), kFailedPrecondition);
  ASSERT_EQ(End(SUPEROFFLOAD_END_ABANDON), kOk);
}

TEST_F(TrainerTest, APieceThatHasComeIsRefused) {
  ASSERT_EQ(HandOver(0, 30, 30), kOk);
  for (auto [first, elements] : {std::pair{30, 30}, {0, 31}, {59, 1}, {0, 120}}) {
    EXPECT_EQ(HandOver(0, first, elements), kFailedPrecondition) << first;
    EXPECT_THAT(superoffload_last_error(), HasSubstr("the gradient of first came twice"));
  }
  EXPECT_THAT(Arrived(), ElementsAre(30, 0));
  ASSERT_EQ(End(SUPEROFFLOAD_END_ABANDON), kOk);
}

TEST_F(TrainerTest, PiecesThatDoNotExistAreRefused) {
  EXPECT_EQ(HandOver(2, 0, 1), kInvalidArgument);
  EXPECT_EQ(HandOver(0, 1, 120), kInvalidArgument);
  EXPECT_EQ(HandOver(0, 1, ~uint64_t{0}), kInvalidArgument);
  EXPECT_EQ(SetAbsent(2), kInvalidArgument);
  EXPECT_THAT(first_.Submissions(), IsEmpty());
}

TEST_F(TrainerTest, AStepIsNotEndedWithoutAllItsGradients) {
  EXPECT_EQ(End(), kFailedPrecondition);
  EXPECT_THAT(superoffload_last_error(), HasSubstr("no step is open"));
  ASSERT_EQ(HandOver(0, 0, 120), kOk);
  EXPECT_EQ(End(), kFailedPrecondition);
  EXPECT_THAT(superoffload_last_error(), HasSubstr("1 of 2 parameters missing, the first being second"));
  EXPECT_EQ(End(SUPEROFFLOAD_END_MEASURE), kFailedPrecondition);
}

TEST_F(TrainerTest, NobodyHandsOverToAStepThatHasEnded) {
  ASSERT_EQ(HandOver(0, 0, 120), kOk);
  ASSERT_EQ(SetAbsent(1), kOk);
  ASSERT_EQ(End(), kOk);
  EXPECT_EQ(HandOver(1, 0, 80), kFailedPrecondition);
  EXPECT_TRUE(Look().ended);
}

TEST_F(TrainerTest, TheNextStepExpectsTheScaleOfTheLastAndFillsTheSlotOfItsVerdict) {
  ASSERT_EQ(HandOver(0, 0, 120), kOk);
  ASSERT_EQ(HandOver(1, 0, 80), kOk);
  const superoffload_step_end end{0.125, 2, 0, SUPEROFFLOAD_END, 0, nullptr};
  ASSERT_EQ(superoffload_end(trainer_, &end), kOk);
  first_.Submissions();
  superoffload_ring_entry verdict{};
  verdict.opcode = SUPEROFFLOAD_COMPLETE_VERDICT;
  verdict.step = 5;
  verdict.index = SUPEROFFLOAD_VERDICT_SKIP_NON_FINITE;
  first_.daemon.Complete(verdict);
  superoffload_answer answer;
  ASSERT_EQ(Wait(SUPEROFFLOAD_AWAIT_VERDICT, &answer), kOk) << superoffload_last_error();
  EXPECT_FALSE(Look().begun);
  ASSERT_EQ(HandOver(0, 0, 120), kOk);
  EXPECT_EQ(std::memcmp(first_.slot(0), gradient_.data(), 480), 0);
  const std::vector<superoffload_ring_entry> entries = first_.daemon.TakeSubmissions();
  ASSERT_FALSE(entries.empty());
  EXPECT_EQ(entries[0].opcode, SUPEROFFLOAD_SUBMIT_BEGIN_STEP);
  EXPECT_EQ(entries[0].payload.f64[0], 0.125);
}

TEST_F(TrainerTest, HyperParametersAreSentWhenTheyChange) {
  const double same[] = {0.5, 0.25}, other[] = {0.5, 0.125};
  ASSERT_EQ(superoffload_set_scalars(trainer_, 0, same, 2), kOk);
  ASSERT_EQ(HandOver(0, 0, 120), kOk);
  EXPECT_THAT(first_.Submissions(),
              ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 0), Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 0)));
  ASSERT_EQ(superoffload_set_scalars(trainer_, 0, other, 2), kOk);
  EXPECT_THAT(first_.Submissions(), ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_GROUP, 0))) << "of the open step";
  EXPECT_EQ(superoffload_set_scalars(trainer_, 1, same, 2), kInvalidArgument);
  EXPECT_EQ(superoffload_set_scalars(trainer_, 0, same, 1), kInvalidArgument);
}

TEST_F(TrainerTest, ASuccessorGetsTheOpenStepInTheSlotThatItFills) {
  ASSERT_EQ(HandOver(1, 0, 80), kOk);
  first_.daemon.Die();
  Attached& second = Succeed();
  EXPECT_EQ(Use(second, /*next_slot=*/0, /*committed_steps=*/3), SUPEROFFLOAD_RESUMED_SUBMITTED);
  EXPECT_THAT(second.Submissions(),
              ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_GROUP, 0), Pair(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 0),
                          Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 2)));
  ASSERT_EQ(HandOver(0, 0, 120), kOk);
  EXPECT_THAT(second.Submissions(),
              ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 0), Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1)));
  EXPECT_EQ(std::memcmp(second.slot(0), gradient_.data(), 480), 0);
}

TEST_F(TrainerTest, WhatADeadDaemonDoesNotTakeItsSuccessorGets) {
  ASSERT_EQ(HandOver(Of({}, 0.5)), kOk);
  first_.daemon.Die();
  superoffload_answer answer;
  EXPECT_EQ(HandOver(0, 0, 120), kOk) << "the ring takes it, and nobody reads it";
  ASSERT_EQ(SetAbsent(1), kOk);
  ASSERT_EQ(End(), kOk);
  EXPECT_EQ(Wait(SUPEROFFLOAD_AWAIT_STEP, &answer), kUnavailable);
  EXPECT_TRUE(Look().gone);
  Attached& second = Succeed();
  EXPECT_EQ(Use(second, 1, 3), SUPEROFFLOAD_RESUMED_SUBMITTED);
  EXPECT_THAT(second.Submissions(),
              ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_GROUP, 0), Pair(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 0),
                          Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 0), Pair(SUPEROFFLOAD_SUBMIT_ABSENT, 1),
                          Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1), Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 2),
                          Pair(SUPEROFFLOAD_SUBMIT_END_STEP, 0)));
}

TEST_F(TrainerTest, GradientsThatComeWhileNobodyListensCount) {
  ASSERT_EQ(HandOver(0, 0, 120), kOk);
  first_.daemon.Die();
  superoffload_answer answer;
  ASSERT_EQ(Wait(SUPEROFFLOAD_AWAIT_NORM, &answer, 0), kFailedPrecondition);
  ASSERT_EQ(HandOver(1, 0, 80), kOk);
  ASSERT_EQ(End(SUPEROFFLOAD_END_MEASURE), kOk);
  ASSERT_EQ(Wait(SUPEROFFLOAD_AWAIT_NORM, &answer), kUnavailable);
  EXPECT_EQ(End(), kUnavailable);
  EXPECT_THAT(Arrived(), ElementsAre(120, 80));
  Attached& second = Succeed();
  EXPECT_EQ(Use(second, 1, 3), SUPEROFFLOAD_RESUMED_SUBMITTED);
  EXPECT_EQ(second.Submissions().back(), (std::pair<int, int>{SUPEROFFLOAD_SUBMIT_END_STEP, 0}));
}

TEST_F(TrainerTest, AStepThatTheDeadDaemonHadCommittedIsOver) {
  ASSERT_EQ(HandOver(0, 0, 120), kOk);
  ASSERT_EQ(HandOver(1, 0, 80), kOk);
  ASSERT_EQ(End(), kOk);
  first_.daemon.Die();
  Attached& second = Succeed(/*last_step=*/5);
  EXPECT_EQ(Use(second, 0, /*committed_steps=*/4), SUPEROFFLOAD_RESUMED_COMMITTED);
  EXPECT_THAT(second.Submissions(), ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_GROUP, 0)));
  EXPECT_FALSE(Look().begun);
  EXPECT_EQ(Look().committed_steps, 4u);
}

TEST_F(TrainerTest, AStepThatIsNotResumedIsDropped) {
  ASSERT_EQ(HandOver(0, 0, 120), kOk);
  Attached& second = Succeed();
  EXPECT_EQ(Use(second, 1, 3, /*resumes=*/false), SUPEROFFLOAD_RESUMED_NOTHING);
  EXPECT_THAT(second.Submissions(), IsEmpty()) << "the optimizer may have been restored";
  EXPECT_EQ(HandOver(0, 0, 120), kOk);
}

TEST_F(TrainerTest, AStepThatIsPreparedIsNotAbandoned) {
  ASSERT_EQ(HandOver(0, 0, 120), kOk);
  ASSERT_EQ(HandOver(1, 0, 80), kOk);
  ASSERT_EQ(End(SUPEROFFLOAD_END_PREPARE), kOk);
  EXPECT_TRUE(Look().prepared);
  for (const uint32_t kind : {SUPEROFFLOAD_END_ABANDON, SUPEROFFLOAD_END, SUPEROFFLOAD_END_PREPARE}) {
    EXPECT_EQ(End(kind), kFailedPrecondition) << kind;
  }
}

TEST_F(TrainerTest, AClosedOptimizerIsNamed) {
  ASSERT_EQ(superoffload_use_attachment(trainer_, nullptr, 0, 0, 0, nullptr), kOk);
  EXPECT_EQ(HandOver(0, 0, 1), kFailedPrecondition);
  EXPECT_THAT(superoffload_last_error(), HasSubstr("closed"));
  superoffload_close_trainer(trainer_);
  EXPECT_EQ(HandOver(0, 0, 1), kFailedPrecondition);
  EXPECT_THAT(superoffload_last_error(), HasSubstr("closed"));
}

TEST_F(TrainerTest, WhereBucketsHaveOneSlotTheCpuWritesNothing) {
  superoffload_close_trainer(trainer_);
  ASSERT_EQ(Open(/*slot_bytes=*/0), kOk) << superoffload_last_error();
  Attached& attached = Succeed();
  EXPECT_EQ(Use(attached, /*next_slot=*/0, /*committed_steps=*/4), SUPEROFFLOAD_RESUMED_NOTHING);
  EXPECT_EQ(HandOver(0, 0, 120), kFailedPrecondition);
  EXPECT_THAT(superoffload_last_error(),
              HasSubstr("has one slot for gradients, for which only trainers on a GPU wait"));
}

TEST_F(TrainerTest, AGradientOfAnotherDtypeIsRefused) {
  const superoffload_piece piece{reinterpret_cast<uint64_t>(gradient_.data()), 0, 120, 0, /*BFLOAT16*/ 1};
  EXPECT_EQ(HandOver(Of({&piece, 1})), kFailedPrecondition);
  EXPECT_THAT(superoffload_last_error(), HasSubstr("the gradient of first is bfloat16, but was to be float32"));
}

TEST(TrainerOptionsTest, BucketsThatDoNotHoldAParameterAreRefused) {
  superoffload_bucket buckets[2]{};
  buckets[0].elements = 3;
  int64_t number = 0;
  for (const auto& [first_bucket, bucket_count, elements] :
       {std::tuple<uint32_t, uint32_t, uint64_t>{1, 2, 3}, {0, 1, 4}, {~0u, 2, 3}}) {
    const superoffload_parameter parameter{"wide",       elements,     0,        0,       {0, 0}, 0,
                                           first_bucket, bucket_count, kFloat32, kFloat32};
    const superoffload_trainer_options options{&parameter, buckets, 1, 2, 1, 1, 1, 0};
    EXPECT_EQ(superoffload_open_trainer(&options, &number), kInvalidArgument) << first_bucket;
  }
}

TEST(XlaHandlerTest, APlatformWithoutHandlersIsRefused) {
  void* handler = nullptr;
  EXPECT_EQ(superoffload_xla_handler("hand_over", "tpu", &handler), kUnimplemented);
  EXPECT_EQ(handler, nullptr);
}

}  // namespace
}  // namespace superoffload::client
