// Prints the tables of ours in server/simulator/README.md.
#include <cstdio>

#include "server/simulator/our_tables.h"
#include "superoffload/v1/exit_status.h"

int main(int argc, char** argv) {
  if (superoffload::AsksForHelp(argc, argv)) {
    std::printf("Prints the tables of what is simulated of us, as README.md has them.\n");
    return 0;
  }
  std::printf("%s\n%s\n%s", superoffload::simulator::OurTables().c_str(),
              superoffload::simulator::RanksTable().c_str(), superoffload::simulator::ResidentsTable().c_str());
}
