// Prints the tables of server/simulator/README.md.
#include <cstdio>

#include "server/simulator/paper_tables.h"

int main() { std::fputs(superoffload::simulator::PaperTables().c_str(), stdout); }
