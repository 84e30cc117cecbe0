#include "client/src/cpp/superchips.h"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <system_error>
#include <tuple>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "superoffload/v1/runtime_directory.h"

namespace superoffload {
namespace {

constexpr char kPlaceholder[] = "{local_rank}";
constexpr std::chrono::seconds kTopologyPatience{5};

// Of this process among those of its job on this machine, and how many they are.
struct LocalRank {
  uint32_t rank = 0;
  std::optional<uint32_t> ranks;
};

std::optional<uint32_t> Number(const char* variable) {
  const char* const text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  const std::string word(text);
  uint32_t number = 0;
  const std::string digits = word.substr(0, word.find_first_not_of("0123456789"));  // Slurm: "2(x4)"
  return absl::SimpleAtoi(digits, &number) ? std::optional(number) : std::nullopt;
}

std::optional<LocalRank> FindLocalRank() {
  constexpr const char* kVariables[][2] = {{"LOCAL_RANK", "LOCAL_WORLD_SIZE"},
                                           {"SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
                                           {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"}};
  for (const auto& [rank, ranks] : kVariables) {
    if (const std::optional<uint32_t> found = Number(rank)) return LocalRank{*found, Number(ranks)};
  }
  return std::nullopt;
}

bool Holds(const v1::Superchip& superchip, const std::set<uint32_t>& cpus) {
  std::set<uint32_t> its;
  for (const v1::Superchip::Core& core : superchip.cores()) its.insert(core.cpus().begin(), core.cpus().end());
  return std::includes(its.begin(), its.end(), cpus.begin(), cpus.end());
}

std::set<uint32_t> OwnCpus() {
  cpu_set_t mask;
  std::set<uint32_t> cpus;
  if (::sched_getaffinity(0, sizeof(mask), &mask) != 0) return cpus;
  for (uint32_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &mask)) cpus.insert(cpu);
  }
  return cpus;
}

v1::Topology TopologyAt(const std::string& endpoint) {
  const auto stub = v1::ServerService::NewStub(grpc::CreateChannel(endpoint, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kTopologyPatience);
  v1::Topology topology;
  return stub->GetTopology(&context, {}, &topology).ok() ? topology : v1::Topology();
}

}  // namespace

absl::StatusOr<std::string> FillLocalRank(const std::string& endpoint) {
  if (endpoint.find(kPlaceholder) == std::string::npos) return endpoint;
  const std::optional<LocalRank> local = FindLocalRank();
  if (local) return absl::StrReplaceAll(endpoint, {{kPlaceholder, absl::StrCat(local->rank)}});
  return absl::InvalidArgumentError(
      absl::StrCat("the endpoint ", endpoint, " needs a local rank, but none of $LOCAL_RANK, $SLURM_LOCALID, ",
                   "$OMPI_COMM_WORLD_LOCAL_RANK is set; start the job with a launcher, or name this rank's daemon"));
}

std::vector<std::string> SiblingSockets(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path base(directory);
  const std::string prefix = base.filename().string() + "-";
  const fs::path own = fs::weakly_canonical(base / kControlSocket, error);
  std::vector<std::string> sockets;
  for (const fs::directory_entry& entry : fs::directory_iterator(base.parent_path(), error)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(prefix, 0) != 0 || name.find_first_not_of("0123456789", prefix.size()) != std::string::npos) {
      continue;
    }
    const fs::path socket = entry.path() / kControlSocket;
    if (fs::is_socket(socket, error) && fs::weakly_canonical(socket, error) != own) sockets.push_back(socket.string());
  }
  std::sort(sockets.begin(), sockets.end());
  return sockets;
}

std::string ChooseEndpoint(const std::vector<std::pair<std::string, v1::Topology>>& daemons,
                           const std::set<uint32_t>& cpus) {
  std::vector<std::tuple<uint32_t, std::string, const v1::Superchip*>> bound;
  for (const auto& [endpoint, topology] : daemons) {
    if (!topology.has_used_superchip()) continue;
    if (topology.used_superchip() >= static_cast<uint32_t>(topology.superchips_size())) continue;
    bound.emplace_back(topology.used_superchip(), endpoint,
                       &topology.superchips(static_cast<int>(topology.used_superchip())));
  }
  if (bound.empty()) return daemons.front().first;
  std::sort(bound.begin(), bound.end());
  for (const auto& [index, endpoint, superchip] : bound) {
    if (Holds(*superchip, cpus)) return endpoint;
  }
  const std::optional<LocalRank> local = FindLocalRank();
  size_t place = 0;
  if (local && local->ranks && local->rank < *local->ranks) {
    place =
        local->rank * bound.size() / *local->ranks;  // the first ranks to the first Superchip, as launchers bind them
  } else if (local) {
    place = local->rank % bound.size();
  }
  return std::get<std::string>(bound[place]);
}

std::string ChooseEndpoint(const std::vector<std::string>& endpoints) {
  std::vector<std::pair<std::string, v1::Topology>> daemons;
  for (const std::string& endpoint : endpoints) daemons.emplace_back(endpoint, TopologyAt(endpoint));
  return ChooseEndpoint(daemons, OwnCpus());
}

}  // namespace superoffload
