#include "kernels/base/check.h"

#include <gtest/gtest.h>

#include <string>

namespace superoffload {
namespace {

enum class Phase { kIdle, kOpen };

class CheckDeathTest : public ::testing::Test {
 protected:
  CheckDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST(CheckTest, EvaluatesEachOperandOnceAndGoesOn) {
  int calls = 0;
  const auto next = [&calls] { return ++calls; };
  SUPEROFFLOAD_CHECK(next() == 1);
  SUPEROFFLOAD_CHECK_EQ(next(), 2, "unused");
  SUPEROFFLOAD_CHECK_LE(next(), 3u);
  SUPEROFFLOAD_CHECK_LT(next(), size_t{5});
  EXPECT_EQ(calls, 4);
}

TEST(CheckTest, IntegersCompareByValueWhateverTheirSigns) {
  SUPEROFFLOAD_CHECK_LT(-1, 1u);
  SUPEROFFLOAD_CHECK_LE(-1, size_t{0});
}

TEST_F(CheckDeathTest, NamesPlaceConditionAndMessage) {
  const int buckets = 3;
  EXPECT_DEATH(SUPEROFFLOAD_CHECK(buckets > 4, "bucket ", 7, " of ", std::string("layer")),
               "check failed at base/check_test.cc:[0-9]+: buckets > 4; bucket 7 of layer\n");
}

TEST_F(CheckDeathTest, NamesBothValues) {
  const Phase phase = Phase::kIdle;
  EXPECT_DEATH(SUPEROFFLOAD_CHECK_EQ(phase, Phase::kOpen), "phase == Phase::kOpen \\(0, 1\\)\n");
  EXPECT_DEATH(SUPEROFFLOAD_CHECK_LT(-2, -3L, "slot"), "-2 < -3L \\(-2, -3\\); slot\n");
  EXPECT_DEATH(SUPEROFFLOAD_CHECK_LE(0.5, 0.25), "\\(0.5, 0.25\\)\n");
}

TEST_F(CheckDeathTest, NamesTheInnermostOptimizerAndStep) {
  const CheckScope outer("llama", 16);
  {
    const CheckScope inner("other", 3);
  }
  EXPECT_DEATH(SUPEROFFLOAD_CHECK(false), "; optimizer \"llama\", step 16\n");
}

TEST_F(CheckDeathTest, CutsOffWhatIsTooLong) { EXPECT_DEATH(SUPEROFFLOAD_CHECK(false, std::string(5000, 'x')), "x\n"); }

}  // namespace
}  // namespace superoffload
