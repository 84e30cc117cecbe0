// The keeper: a service manager for places without systemd (containers, tests). It starts the daemon, keeps the
// descriptors that the daemon gives it, and starts the daemon again with them when it dies. It speaks systemd's
// protocol (sd_notify(3), sd_listen_fds(3)), so that the daemon knows only one.
#ifndef SUPEROFFLOAD_SERVER_KEEPER_H_
#define SUPEROFFLOAD_SERVER_KEEPER_H_

#include <string>
#include <vector>

namespace superoffload {

// Runs `command` until it exits by itself, and returns its exit status. SIGTERM and SIGINT are passed on to it. A
// command that is killed or crashes is started again, after a short pause when it had only just started.
int RunKeeper(const std::vector<std::string>& command);

}  // namespace superoffload

#endif  // SUPEROFFLOAD_SERVER_KEEPER_H_
