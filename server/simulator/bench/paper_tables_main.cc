// Prints the tables of server/simulator/README.md.
#include <cstdio>

#include "server/simulator/paper_tables.h"
#include "superoffload/v1/exit_status.h"

int main(int argc, char** argv) {
  if (superoffload::AsksForHelp(argc, argv)) {
    std::printf("Prints the paper's tables beside what the simulator makes of them, as README.md has them.\n");
    return 0;
  }
  std::fputs(superoffload::simulator::PaperTables().c_str(), stdout);
}
