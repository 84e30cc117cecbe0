#include "tests/simulation/our_tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "tests/simulation/choices.h"

namespace superoffload::simulator {
namespace {

struct Table {
  const char* name;
  std::string (*print)();
};

class OurTablesTest : public ::testing::TestWithParam<Table> {};

TEST_P(OurTablesTest, TheReadmeShowsWhatTheProgramPrints) {
  std::ifstream file(SUPEROFFLOAD_SIMULATION_README);
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_THAT(text.str(), ::testing::HasSubstr(GetParam().print()));
}

INSTANTIATE_TEST_SUITE_P(All, OurTablesTest,
                         ::testing::Values(Table{"Ours", OurTables}, Table{"Ranks", RanksTable},
                                           Table{"Residents", ResidentsTable}, Table{"States", StatesTable},
                                           Table{"Streams", StreamsTable}, Table{"Sequences", SequencesTable},
                                           Table{"Room", RoomTable}, Table{"Choices", plan::ChoicesTable}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace superoffload::simulator
