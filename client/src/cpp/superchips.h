// Which of a machine's daemons a process trains with: that of the Superchip to which its CPUs belong.
// client/python/superoffload/_core/superchips.py has the same rules, and knows the process's GPU.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CPP_SUPERCHIPS_H_
#define SUPEROFFLOAD_CLIENT_SRC_CPP_SUPERCHIPS_H_

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "superoffload/client.hpp"

namespace superoffload {

// With this process's local rank, as its launcher tells it, for each {local_rank}. INVALID_ARGUMENT: none has.
absl::StatusOr<std::string> FillLocalRank(const std::string& endpoint);

// Control sockets of other Superchips' daemons beside that in `directory`: in DIRECTORY-0, DIRECTORY-1, ...
std::vector<std::string> SiblingSockets(const std::string& directory);

// One of the endpoints, of which there is one at least. Topologies: as their daemons see the machine. `cpus`: on which
// the process may run.
std::string ChooseEndpoint(const std::vector<std::pair<std::string, v1::Topology>>& daemons,
                           const std::set<uint32_t>& cpus);

// The same for this process; asks the daemons.
std::string ChooseEndpoint(const std::vector<std::string>& endpoints);

}  // namespace superoffload

#endif  // SUPEROFFLOAD_CLIENT_SRC_CPP_SUPERCHIPS_H_
