// The keeper: a service manager for places without systemd (containers, tests). It starts the daemon, keeps the
// descriptors that the daemon gives it, and starts the daemon again with them when it dies (keeper_protocol.h).
//
// While it keeps anything, nothing ends it but the daemon's exit on purpose or a signal: a daemon that cannot start is
// started again and again, with growing pauses; meanwhile the keeper's socket (keeper_socket.h) lists and drops what is
// kept. A keeper that is killed is replaced by the daemon (keeper_link.h).
#ifndef SUPEROFFLOAD_SERVER_HOST_KEEPER_H_
#define SUPEROFFLOAD_SERVER_HOST_KEEPER_H_

#include <string>
#include <vector>

namespace superoffload::host {

// Runs `command`, or serves the daemon that has started this process, until the daemon exits on purpose; returns the
// exit status. A command that exits with an error when nothing is kept ends it, too. SIGTERM and SIGINT are passed on
// as SIGTERM, once the daemon is ready or where nothing is kept; a daemon that dies before it has stopped is started
// again to finish its stop, at most three times, after which what is kept is dropped and 1 returned. While no daemon
// runs the signals end the keeper, and SIGHUP has it try again at once.
int RunKeeper(const std::vector<std::string>& command);

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_KEEPER_H_
