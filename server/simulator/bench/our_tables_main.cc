// Prints the tables of ours in server/simulator/README.md.
#include <cstdio>

#include "server/simulator/our_tables.h"

int main() {
  std::printf("%s\n%s", superoffload::simulator::OurTables().c_str(), superoffload::simulator::RanksTable().c_str());
}
