// What the daemon and its keeper say to each other: sd_notify(3)'s assignments, one message per packet, over a pair of
// connected sockets (SOCK_SEQPACKET) that nobody else can reach. The end of the connection is the death of the other.
//
//   daemon to keeper: READY=1 with the listening keeper.sock (superoffload/v1/keeper_socket.h); FDSTORE=1 FDNAME=...
//   with descriptors; FDSTOREREMOVE=1 FDNAME=...; X_STOPPED=1 before it
//                     exits on purpose, after which the keeper ends as well
//
// Descriptors that were kept come back as sd_listen_fds(3) has them, but for their names, which are in a memfd,
// separated by colons: a variable of the environment is too short for those of many optimizers.
#ifndef SUPEROFFLOAD_SERVER_HOST_KEEPER_PROTOCOL_H_
#define SUPEROFFLOAD_SERVER_HOST_KEEPER_PROTOCOL_H_

#include <cstddef>

namespace superoffload::host {

// In the daemon's environment: the descriptor of its socket.
inline constexpr char kKeeperSocketVariable[] = "SUPEROFFLOAD_KEEPER_SOCKET";

// Likewise: that of the memfd.
inline constexpr char kKeptNamesVariable[] = "SUPEROFFLOAD_KEPT_NAMES";

// In the environment of a keeper that a daemon has started: "SOCKET:PID" of that daemon.
inline constexpr char kTakenOverDaemonVariable[] = "SUPEROFFLOAD_TAKEN_OVER_DAEMON";

// What the store calls RuntimeDirectory::succession; everything else is an optimizer's memory.
inline constexpr char kSuccessionName[] = "succession";

inline constexpr char kStoppedMessage[] = "X_STOPPED=1";

inline constexpr size_t kMaxMessageBytes = 4096;
inline constexpr size_t kMaxMessageFds = 253;  // SCM_MAX_FD

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_KEEPER_PROTOCOL_H_
