// Ranks of a run: what is prepared and waits for its run, and how an operator ends it.
#ifndef SUPEROFFLOAD_CLIENT_CTL_RUN_H_
#define SUPEROFFLOAD_CLIENT_CTL_RUN_H_

#include <string>

#include "absl/status/status.h"
#include "client/ctl/commands.h"

namespace superoffload::ctl {

// "superoffloadctl report NAME".
absl::Status Report(Client& client, const Arguments& arguments);

// "superoffloadctl resolve NAME abandon" and "... commit SUM SCALE THRESHOLD".
absl::Status Resolve(Client& client, const Arguments& arguments);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_RUN_H_
