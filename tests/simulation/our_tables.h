// What a step of ours costs on a Superchip, simulated: README.md shows what OurTables prints.
#ifndef SUPEROFFLOAD_TESTS_SIMULATION_OUR_TABLES_H_
#define SUPEROFFLOAD_TESTS_SIMULATION_OUR_TABLES_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/simulator/outcome.h"

namespace superoffload::simulator {

struct OurRow {
  std::string_view model;  // in the catalogue
  uint64_t tokens = 0;     // per step and rank
  std::string_view steps;  // how they end
  Outcome ours;
  // The published SuperOffload, of the same machine and workload, over what the paper's tables leave open.
  Outcome fastest, slowest;
};

// On gh200-96-480, sequences of 2048 tokens, activations computed again, the largest micro-batch that fits.
std::vector<OurRow> SimulateOurs();

// What the rows have waited for, the largest first.
std::vector<Exposed> RankCauses(const std::vector<OurRow>& rows);

// All of it, as Markdown.
std::string OurTables();

// What resident buckets gain, as Markdown.
std::string ResidentsTable();

// What narrower moments gain, as Markdown.
std::string StatesTable();

// What it costs that all blocks stream, as Markdown.
std::string StreamsTable();

// How many blocks must stream to one Superchip so that a sequence fits, as Markdown.
std::string SequencesTable();

// What less memory for gradients and published parameters costs, as Markdown.
std::string RoomTable();

struct RanksRow {
  std::string_view model;
  uint32_t ranks = 1;
  uint64_t tokens = 0;  // per step and rank
  std::string_view steps;
  Outcome ours;
};

// The mission's models of several Superchips, sequences of 4096 tokens; all else as above.
std::vector<RanksRow> SimulateRanks();

// As Markdown.
std::string RanksTable();

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_TESTS_SIMULATION_OUR_TABLES_H_
