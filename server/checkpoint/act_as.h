// Files of checkpoints belong to the optimizer's user: a daemon that runs as root must not read or write for a user
// what that user may not.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_ACT_AS_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_ACT_AS_H_

#include <sys/types.h>

#include <functional>

#include "absl/status/status.h"

namespace superoffload::checkpoint {

// From here on this thread, and it alone, uses files with the rights of `uid` and of the groups that the machine's
// user database has for it.
// PERMISSION_DENIED: the daemon is not that user and lacks CAP_SETUID or CAP_SETGID; the thread must not go on.
absl::Status ActAs(uid_t uid);

// Runs `work` in a thread of its own that acts as `uid`, and waits for it.
absl::Status RunAs(uid_t uid, const std::function<absl::Status()>& work);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_ACT_AS_H_
