// "superoffloadctl list": the optimizers of a daemon, or of all daemons of a machine.
#ifndef SUPEROFFLOAD_CLIENT_CTL_LIST_H_
#define SUPEROFFLOAD_CLIENT_CTL_LIST_H_

#include <string>

#include "absl/status/status.h"
#include "client/ctl/commands.h"

namespace superoffload::ctl {

absl::Status List(Client& client, const Arguments& arguments);

// Of all daemons at `endpoints`, separated by commas; else of all of this machine that are where they are by default. One
// that does not answer is named on stderr, and the others are listed; UNAVAILABLE when there is none.
absl::Status ListAll(const std::string& endpoints, bool json);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_LIST_H_
