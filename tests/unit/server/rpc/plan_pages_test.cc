#include "server/rpc/plan_pages.h"

#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "tests/unit/server/optimizer/fake_house.h"

namespace superoffload::rpc {
namespace {

optimizer::OptimizerPtr Hosted(optimizer::FakeHouse& house, const std::string& name) {
  engine::OptimizerSpec spec = optimizer::SmallSpec();
  spec.groups.push_back(spec.groups.front());
  spec.parameters.clear();
  for (uint32_t i = 0; i < 5; ++i) {
    spec.parameters.push_back({.name = std::string(1, 'a' + i), .shape = {16}, .group = i % 2});
  }
  return *house.table.Create(optimizer::FakeHouse::User(1001), name, spec, {}, "description");
}

v1::Optimizer Page(const optimizer::HostedOptimizer& hosted, const std::string& token, size_t page_bytes,
                   uint64_t committed_steps) {
  v1::Optimizer page;
  if (token.empty()) page.set_committed_steps(committed_steps);
  EXPECT_TRUE(AddPlanPage(hosted, token, page_bytes, &page).ok());
  return page;
}

TEST(PlanPagesTest, PagesTogetherAreTheWhole) {
  optimizer::FakeHouse house;
  const optimizer::OptimizerPtr hosted = Hosted(house, "o");
  for (const uint64_t committed_steps : {0, 1}) {  // with 1, all parameters lack a step
    const v1::Optimizer whole = Page(*hosted, "", std::numeric_limits<size_t>::max(), committed_steps);
    EXPECT_EQ(whole.parameters_size(), 5);
    EXPECT_EQ(whole.parameter_steps_size(), committed_steps == 0 ? 0 : 5);
    EXPECT_EQ(whole.next_page_token(), "");
    for (const size_t page_bytes : {1, 100}) {
      v1::Optimizer merged;
      int pages = 0;
      do {
        const std::string token = merged.next_page_token();
        merged.clear_next_page_token();
        const v1::Optimizer page = Page(*hosted, token, page_bytes, committed_steps);
        if (page_bytes == 1) {
          EXPECT_EQ(page.groups_size() + page.parameters_size() + page.layout().buckets_size(), 1);
        }
        merged.MergeFrom(page);
        ++pages;
      } while (!merged.next_page_token().empty());
      EXPECT_GT(pages, 1);
      EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(merged, whole)) << merged.DebugString();
    }
  }
}

TEST(PlanPagesTest, ATokenOfAnotherOptimizerIsRefused) {
  optimizer::FakeHouse house;
  const optimizer::OptimizerPtr hosted = Hosted(house, "o");
  const std::string token = Page(*hosted, "", 1, 0).next_page_token();
  const std::string id = hosted->unique_id();
  v1::Optimizer page;
  for (const std::string& wrong :
       {std::string("x"), std::string("////"), id + "/0/0/0", id + "/3/0/0/0", id + "/0/6/0/0", id + "/0/0/9/0",
        id + "/-1/0/0/0", Page(*Hosted(house, "p"), "", 1, 0).next_page_token()}) {
    EXPECT_EQ(AddPlanPage(*hosted, wrong, 1, &page).code(), absl::StatusCode::kInvalidArgument) << wrong;
  }
  EXPECT_TRUE(AddPlanPage(*hosted, token, 1, &page).ok());
}

}  // namespace
}  // namespace superoffload::rpc
