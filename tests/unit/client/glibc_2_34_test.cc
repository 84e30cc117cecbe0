// A program with a static C++ runtime, as our library is: what it would ask of a newer glibc works without it.
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <stdexcept>
#include <vector>

namespace superoffload {
namespace {

[[gnu::noinline]] int Deep(int levels) {
  const std::vector<int> destroyed_on_the_way(3);
  if (levels == 0) throw std::out_of_range("deep");
  return Deep(levels - 1) + static_cast<int>(destroyed_on_the_way.size());
}

TEST(Glibc234Test, ExceptionsFindTheirHandlers) {
  EXPECT_THROW(Deep(20), std::out_of_range);
  EXPECT_THROW(static_cast<void>(std::vector<int>().at(7)), std::out_of_range);  // from the runtime's own code
}

TEST(Glibc234Test, RandomNumbersDiffer) {
  std::random_device device;
  std::set<unsigned> numbers;
  for (int i = 0; i < 1000; ++i) numbers.insert(device());
  EXPECT_GT(numbers.size(), 990u);
}

}  // namespace
}  // namespace superoffload
