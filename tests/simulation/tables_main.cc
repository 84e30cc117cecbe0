// Prints the tables of README.md: the paper's beside what the simulator makes of them, then ours.
#include <cstdio>

#include "superoffload/v1/exit_status.h"
#include "tests/simulation/choices.h"
#include "tests/simulation/our_tables.h"
#include "tests/simulation/paper_tables.h"

int main(int argc, char** argv) {
  if (superoffload::AsksForHelp(argc, argv)) {
    std::printf(
        "Prints the tables of the paper beside what is simulated of them, and those of ours, as README.md has them.\n");
    return 0;
  }
  for (const auto& table :
       {superoffload::simulator::PaperTables, superoffload::simulator::OurTables, superoffload::simulator::RanksTable,
        superoffload::simulator::ResidentsTable, superoffload::simulator::StatesTable,
        superoffload::simulator::StreamsTable, superoffload::simulator::SequencesTable,
        superoffload::simulator::RoomTable, superoffload::plan::ChoicesTable}) {
    std::printf("%s\n", table().c_str());
  }
}
