// Directories of the daemon's own, into which nobody else may put anything.
#ifndef SUPEROFFLOAD_SERVER_HOST_OWNED_DIRECTORY_H_
#define SUPEROFFLOAD_SERVER_HOST_OWNED_DIRECTORY_H_

#include <sys/types.h>

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "server/memory/shared_memory.h"

namespace superoffload::host {

// Opens the directory, and makes it with `mode` where it is missing and a mode is given. `field` of the configuration
// names it. PERMISSION_DENIED: it belongs to neither this user nor root, or others may write to it.
absl::StatusOr<memory::FileDescriptor> OpenOwnedDirectory(const std::string& field, const std::string& path,
                                                          std::optional<mode_t> mode);

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_OWNED_DIRECTORY_H_
