// Gradients in pieces, through the C interface, to a daemon that a test plays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "superoffload/superoffload_xla.h"
#include "tests/unit/client/fake_daemon.h"

namespace superoffload::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr uint64_t kSlotBytes = 2048;
constexpr int kFailedPrecondition = 9, kInvalidArgument = 3, kUnimplemented = 12;

// Buckets of 100, 60 and 40 elements, 64 bytes apart; "first" is in buckets 0 and 1, "second" in 1 and 2.
class PieceSubmitterTest : public ::testing::Test {
 protected:
  PieceSubmitterTest() {
    EXPECT_EQ(superoffload_connect(daemon_.path().c_str(), &connection_), 0);
    EXPECT_EQ(superoffload_attach(connection_, kEpoch, 4, kBuckets, &attachment_), 0);
    EXPECT_EQ(Open(), 0) << superoffload_last_error();
    EXPECT_EQ(superoffload_xla_attach(submitter_, attachment_), 0);
    const double scalars[] = {0.5, 0.25};
    EXPECT_EQ(superoffload_xla_set_scalars(submitter_, 0, scalars, 2), 0);
    EXPECT_EQ(superoffload_xla_step_over(submitter_, /*next_slot=*/1, /*committed_steps=*/3, 1.0), 0);
    std::iota(gradient_.begin(), gradient_.end(), 1.0f);
  }
  ~PieceSubmitterTest() override {
    superoffload_xla_close(submitter_);
    superoffload_detach(attachment_);
    superoffload_disconnect(connection_);
  }

  int Open() {
    const superoffload_xla_parameter parameters[] = {{120, 0, {0, kSlotBytes}, 0, 2, 3, 0},
                                                     {80, 480, {480, kSlotBytes + 480}, 1, 2, 3, 0}};
    superoffload_bucket buckets[kBuckets]{};
    uint64_t first = 0;
    for (auto [bucket, elements] : {std::pair{0, 100}, {1, 60}, {2, 40}}) {
      buckets[bucket].elements = elements;
      buckets[bucket].gradient_offsets[0] = 4 * first;
      buckets[bucket].gradient_offsets[1] = kSlotBytes + 4 * first;
      first += elements;
    }
    const char* names[] = {"first", "second"};
    const superoffload_xla_options options{parameters, names, buckets, 2, kBuckets, 1, 2, 1, 0};
    return superoffload_xla_open(&options, &submitter_);
  }

  int HandOver(uint32_t parameter, uint64_t first, uint64_t elements) {
    return superoffload_xla_hand_over(submitter_, parameter, first, elements, gradient_.data() + first);
  }

  std::vector<std::pair<int, int>> Submissions() {  // opcodes and indices
    std::vector<std::pair<int, int>> found;
    for (const superoffload_ring_entry& entry : daemon_.TakeSubmissions()) found.emplace_back(entry.opcode, entry.index);
    return found;
  }

  FakeDaemon daemon_;
  superoffload_connection* connection_ = nullptr;
  superoffload_attachment* attachment_ = nullptr;
  int64_t submitter_ = 0;
  std::vector<float> gradient_ = std::vector<float>(200);
};

TEST_F(PieceSubmitterTest, TheFirstPieceBeginsTheStepAndABucketIsSubmittedWithItsLastOne) {
  ASSERT_EQ(HandOver(1, 40, 40), 0) << superoffload_last_error();
  EXPECT_THAT(Submissions(), ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_GROUP, 0), Pair(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 0),
                                         Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 2)));
  ASSERT_EQ(HandOver(0, 0, 120), 0);
  EXPECT_THAT(Submissions(), ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 0)));
  ASSERT_EQ(HandOver(1, 0, 40), 0);
  EXPECT_THAT(Submissions(), ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1)));

  const char* slot = static_cast<const char*>(superoffload_gradients(attachment_, nullptr)) + kSlotBytes;
  EXPECT_EQ(std::memcmp(slot, gradient_.data(), 480), 0);
  EXPECT_EQ(std::memcmp(slot + 480, gradient_.data(), 320), 0);
  uint64_t arrived[2];
  ASSERT_EQ(superoffload_xla_arrived(submitter_, arrived), 0);
  EXPECT_THAT(arrived, ElementsAre(120, 80));
}

TEST_F(PieceSubmitterTest, AnAbsentParameterIsSaidBeforeItsBuckets) {
  ASSERT_EQ(superoffload_xla_absent(submitter_, 0), 0) << superoffload_last_error();
  EXPECT_THAT(Submissions(), ElementsAre(Pair(SUPEROFFLOAD_SUBMIT_GROUP, 0), Pair(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 0),
                                         Pair(SUPEROFFLOAD_SUBMIT_ABSENT, 0), Pair(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 0)));
}

TEST_F(PieceSubmitterTest, APieceThatHasComeIsRefusedAndTheStepKeepsTheError) {
  ASSERT_EQ(HandOver(0, 30, 30), 0);
  for (auto [first, elements] : {std::pair{30, 30}, {0, 31}, {59, 1}, {0, 120}}) {
    EXPECT_EQ(HandOver(0, first, elements), kFailedPrecondition) << first;
    EXPECT_THAT(superoffload_last_error(), HasSubstr("the gradient of first came twice"));
  }
  uint64_t arrived[2];
  EXPECT_EQ(superoffload_xla_arrived(submitter_, arrived), kFailedPrecondition);
  EXPECT_THAT(arrived, ElementsAre(30, 0));
  superoffload_xla_open_step step;
  uint32_t buckets[kBuckets];
  EXPECT_EQ(superoffload_xla_take(submitter_, &step, buckets), kFailedPrecondition);
  EXPECT_TRUE(step.begun);
  ASSERT_EQ(superoffload_abandon_step(attachment_), 0);
  ASSERT_EQ(superoffload_xla_step_over(submitter_, 1, 3, 1.0), 0);
  EXPECT_EQ(superoffload_xla_take(submitter_, &step, buckets), 0);
  EXPECT_FALSE(step.begun);
}

TEST_F(PieceSubmitterTest, PiecesThatDoNotExistAreRefused) {
  EXPECT_EQ(HandOver(2, 0, 1), kInvalidArgument);
  EXPECT_EQ(HandOver(0, 1, 120), kInvalidArgument);
  EXPECT_EQ(HandOver(0, 1, ~uint64_t{0}), kInvalidArgument);
  EXPECT_THAT(Submissions(), ElementsAre());
}

TEST_F(PieceSubmitterTest, NobodyHandsOverToAStepThatWasTaken) {
  ASSERT_EQ(HandOver(0, 0, 120), 0);
  superoffload_xla_open_step step;
  uint32_t buckets[kBuckets];
  ASSERT_EQ(superoffload_xla_take(submitter_, &step, buckets), 0);
  EXPECT_EQ(step.bucket_count, 1u);
  EXPECT_EQ(buckets[0], 0u);
  EXPECT_EQ(step.next_slot, 1u);
  EXPECT_EQ(step.committed_steps, 3u);
  EXPECT_EQ(HandOver(1, 0, 80), kFailedPrecondition);
}

TEST_F(PieceSubmitterTest, AClosedOptimizerIsNamed) {
  superoffload_xla_close(submitter_);
  EXPECT_EQ(HandOver(0, 0, 1), kFailedPrecondition);
  EXPECT_THAT(superoffload_last_error(), HasSubstr("closed"));
}

TEST_F(PieceSubmitterTest, BucketsThatDoNotExistAreRefused) {
  const superoffload_xla_parameter parameter{1, 0, {0, 0}, 1, 2, 3, 0};
  const char* name = "wide";
  const superoffload_bucket buckets[2]{};
  const superoffload_xla_options options{&parameter, &name, buckets, 1, 2, 1, 1, 1, 0};
  int64_t number = 0;
  EXPECT_EQ(superoffload_xla_open(&options, &number), kInvalidArgument);
}

TEST(XlaHandlerTest, APlatformWithoutHandlersIsRefused) {
  void* handler = nullptr;
  EXPECT_EQ(superoffload_xla_handler("hand_over", "tpu", &handler), kUnimplemented);
  EXPECT_EQ(handler, nullptr);
}

}  // namespace
}  // namespace superoffload::client
