// superoffloadctl doctor: looks at the machine for what makes a daemon slow, unsafe or impossible.
#ifndef SUPEROFFLOAD_CLIENT_CTL_DOCTOR_H_
#define SUPEROFFLOAD_CLIENT_CTL_DOCTOR_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::ctl {

enum class Severity { kOk, kNote, kWarning, kFailure };

struct Finding {
  std::string check;
  Severity severity = Severity::kOk;
  std::string what;
  std::string remedy;  // empty when there is nothing to do
};

// `root` is prepended to every path that is looked at; `daemon` is what a daemon says of itself, or why none does;
// `same_pid_namespace` tells whether it shares this process's.
std::vector<Finding> Examine(const std::string& root, const absl::StatusOr<v1::ServerInfo>& daemon,
                             bool same_pid_namespace);

std::string FindingsText(const std::vector<Finding>& findings);

// One JSON array of {check, severity, what, remedy}.
std::string FindingsJson(const std::vector<Finding>& findings);

// The command. Exit status 0 unless something fails.
int RunDoctor(const std::string& endpoint, const std::string& root, bool json);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_DOCTOR_H_
