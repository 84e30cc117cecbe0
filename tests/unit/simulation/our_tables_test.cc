#include "tests/simulation/our_tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

namespace superoffload::simulator {
namespace {

TEST(OurTablesTest, TheReadmeShowsWhatTheProgramPrints) {
  std::ifstream file(SUPEROFFLOAD_SIMULATION_README);
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_THAT(text.str(), ::testing::HasSubstr(OurTables()));
  EXPECT_THAT(text.str(), ::testing::HasSubstr(RanksTable()));
  EXPECT_THAT(text.str(), ::testing::HasSubstr(ResidentsTable()));
  EXPECT_THAT(text.str(), ::testing::HasSubstr(StatesTable()));
  EXPECT_THAT(text.str(), ::testing::HasSubstr(RoomTable()));
}

}  // namespace
}  // namespace superoffload::simulator
