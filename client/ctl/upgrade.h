// superoffloadctl check-upgrade: whether another superoffloadd could take over what the running one hosts.
#ifndef SUPEROFFLOAD_CLIENT_CTL_UPGRADE_H_
#define SUPEROFFLOAD_CLIENT_CTL_UPGRADE_H_

#include <string>

#include "absl/status/statusor.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::ctl {

// The program that is installed beside this one, or lies in the tree that it was built in.
std::string InstalledDaemon();

// $SUPEROFFLOAD_DAEMON, or the installed one.
std::string DaemonProgram();

// What to tell an operator when `program` will recover every optimizer of the daemon that `running` describes.
// FAILED_PRECONDITION: it will not. UNAVAILABLE: the program does not say what it reads.
absl::StatusOr<std::string> CheckUpgrade(const v1::ServerInfo& running, const std::string& program);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_UPGRADE_H_
