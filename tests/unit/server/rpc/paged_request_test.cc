#include "server/rpc/paged_request.h"

#include <gtest/gtest.h>

#include <string>

#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::rpc {
namespace {

using Create = PagedRequest<v1::CreateOptimizerRequest>;

v1::CreateOptimizerRequest Page(const std::string& parameter, bool more) {
  v1::CreateOptimizerRequest page;
  page.add_parameters()->set_name(parameter);
  page.set_more(more);
  return page;
}

TEST(PagedRequestTest, PagesAreStrungTogetherAndChargedWhileTheRequestLives) {
  memory::MemoryBudget budget(1 << 20);
  {
    Create request(&budget, 1001);
    v1::CreateOptimizerRequest first = Page("a", true), last = Page(std::string(1000, 'b'), false);
    first.set_name("o");
    EXPECT_TRUE(request.Add(first).ok());
    EXPECT_FALSE(request.complete());
    const uint64_t charged = budget.used().metadata_bytes;
    EXPECT_TRUE(request.Add(last).ok());
    EXPECT_TRUE(request.complete());
    EXPECT_GE(budget.used().metadata_bytes, charged + 1000);
    EXPECT_EQ(request.whole().name(), "o");
    ASSERT_EQ(request.whole().parameters_size(), 2);
    EXPECT_EQ(request.whole().parameters(0).name(), "a");
    EXPECT_FALSE(request.whole().more()) << "after the last page";
  }
  EXPECT_EQ(budget.used().total_bytes(), 0u);
}

TEST(PagedRequestTest, APageBeyondTheBudgetIsRefused) {
  memory::MemoryBudget budget(64 << 10);
  Create request(&budget, 1001);
  int taken = 0;
  absl::Status status;
  for (v1::CreateOptimizerRequest page; status.ok(); taken += status.ok()) {
    page = Page(std::string(1000, 'a'), true);
    status = request.Add(page);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_LT(taken, 64);
}

TEST(PagedRequestTest, UnknownFieldsAreNeitherKeptNorCharged) {
  memory::MemoryBudget budget(64 << 10);
  Create request(&budget, 1001);
  v1::CreateOptimizerRequest page;
  page.GetReflection()->MutableUnknownFields(&page)->AddLengthDelimited(1007, std::string(1 << 20, 'x'));
  EXPECT_TRUE(request.Add(page).ok());
  EXPECT_LT(request.whole().SpaceUsedLong(), size_t{1} << 20);
}

TEST(PagedRequestTest, ARequestHasALength) {
  memory::MemoryBudget budget(uint64_t{1} << 40);
  Create request(&budget, 1001);
  v1::CreateOptimizerRequest page = Page(std::string(kMaxRequestBytes - 100, 'a'), true);
  EXPECT_TRUE(request.Add(page).ok());
  page = Page(std::string(1000, 'a'), false);
  EXPECT_EQ(request.Add(page).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace superoffload::rpc
