// Commands on checkpoints as they lie on disk: they need no daemon, only the daemon's program.
#ifndef SUPEROFFLOAD_CLIENT_CTL_CHECKPOINT_H_
#define SUPEROFFLOAD_CLIENT_CTL_CHECKPOINT_H_

#include <string>

namespace superoffload::ctl {

// Whether it is a directory, and so no optimizer's name.
bool IsDirectory(const std::string& path);

// Both return the exit status; the daemon's program has said why it is not 0.
int InspectCheckpoint(const std::string& path, bool json, bool verify);

struct ModelOptions {
  std::string source;
  std::string dtype;
  std::string shard_bytes;
};
int ExportCheckpoint(const std::string& path, const std::string& target, const ModelOptions& options);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_CHECKPOINT_H_
