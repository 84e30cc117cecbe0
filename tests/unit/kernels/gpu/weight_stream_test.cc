#include "kernels/gpu/weight_stream.h"

#include <gtest/gtest.h>

#include <vector>

namespace superoffload::kernels {
namespace {

TEST(UnitsOfTest, NumbersMayHaveGaps) {
  const uint32_t numbers[] = {9, 0, 4, 9, 7, 0};
  const std::vector<StreamedUnit> units = UnitsOf(numbers);
  ASSERT_EQ(units.size(), 3u);
  EXPECT_EQ(units[0].number, 4u);
  EXPECT_EQ(units[1].number, 7u);
  EXPECT_EQ(units[2].buckets, (std::vector<uint32_t>{0, 3}));
  EXPECT_TRUE(UnitsOf(std::vector<uint32_t>{0, 0}).empty());
}

}  // namespace
}  // namespace superoffload::kernels
