// superoffloadctl version: what this program is of, and what the running daemon is of.
#ifndef SUPEROFFLOAD_CLIENT_CTL_VERSION_H_
#define SUPEROFFLOAD_CLIENT_CTL_VERSION_H_

#include <string>

#include "absl/status/status.h"

namespace superoffload::ctl {

// Prints it. A daemon that does not run is no error.
absl::Status RunVersion(const std::string& endpoint, bool json);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_VERSION_H_
