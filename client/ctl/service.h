// superoffloadctl install-service and uninstall-service: from a wheel to a service of systemd, and back.
#ifndef SUPEROFFLOAD_CLIENT_CTL_SERVICE_H_
#define SUPEROFFLOAD_CLIENT_CTL_SERVICE_H_

#include <string>

#include "absl/status/status.h"

namespace superoffload::ctl {

struct ServiceOptions {
  std::string root;        // an image's directory: files only, no commands; empty: this machine
  unsigned superchip = 0;
  bool yes = false;        // does not ask
};

// Prints what they will do, and do it once it is wanted. Done again, they do nothing.
absl::Status InstallService(const ServiceOptions& options);
absl::Status UninstallService(const ServiceOptions& options);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_SERVICE_H_
