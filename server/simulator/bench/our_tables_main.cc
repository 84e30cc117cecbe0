// Prints the tables of ours in server/simulator/README.md.
#include <cstdio>

#include "server/simulator/our_tables.h"

int main() { std::fputs(superoffload::simulator::OurTables().c_str(), stdout); }
