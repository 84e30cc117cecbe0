// What a plan chooses for each model of the mission, and the paper's largest: README.md shows what ChoicesTable prints.
#ifndef SUPEROFFLOAD_TESTS_SIMULATION_CHOICES_H_
#define SUPEROFFLOAD_TESTS_SIMULATION_CHOICES_H_

#include <string>

namespace superoffload::plan {

// The host's memory decides how moments and gradients are kept, the GPU's how many tokens a pass may have: where
// everything stays, where inputs of blocks leave as well, and where blocks stream as well. As Markdown.
std::string ChoicesTable();

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_TESTS_SIMULATION_CHOICES_H_
