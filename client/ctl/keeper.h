// superoffloadctl kept, drop-kept: what a daemon's keeper holds, also while no daemon can start.
#ifndef SUPEROFFLOAD_CLIENT_CTL_KEEPER_H_
#define SUPEROFFLOAD_CLIENT_CTL_KEEPER_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::ctl {

// The optimizers that the keeper of the daemon at `endpoint` keeps: their name, uid and memory_bytes. UNAVAILABLE: no
// keeper answers there.
absl::StatusOr<v1::ListOptimizersResponse> ListKept(const std::string& endpoint);

// Frees one, NAME or UID/NAME. NOT_FOUND. FAILED_PRECONDITION: a daemon runs, or several users have one of that name.
absl::Status DropKept(const std::string& endpoint, const std::string& name, std::optional<uint32_t> uid);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_KEEPER_H_
