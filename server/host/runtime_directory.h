// The directory of the daemon's sockets. Trainers trust whoever listens there with their weights, and a daemon may be
// root: nobody else may put anything into it, and no link in it is followed.
#ifndef SUPEROFFLOAD_SERVER_HOST_RUNTIME_DIRECTORY_H_
#define SUPEROFFLOAD_SERVER_HOST_RUNTIME_DIRECTORY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/memory/shared_memory.h"

namespace superoffload::host {

class RuntimeDirectory {
 public:
  // Claims the directory for this process; `make`: with mode 0755 where it is missing. `inherited`: the predecessor's
  // `succession`, or invalid. FAILED_PRECONDITION: another daemon serves there, or is about to be started again.
  // PERMISSION_DENIED: it belongs to neither this user nor root, others may write to it, or what should be one of its
  // locks is a link.
  static absl::StatusOr<std::unique_ptr<RuntimeDirectory>> Claim(const std::string& path, bool make,
                                                                 memory::FileDescriptor inherited);

  // Removes the sockets that it listens on.
  ~RuntimeDirectory();

  // See transport::ListenOn.
  absl::StatusOr<memory::FileDescriptor> Listen(const std::string& name, int type);

  // Takes the sockets' names away, so that trainers do not wait for a successor.
  void RemoveSockets();

  // A descriptor that, as long as anybody has it open, keeps the directory from all but whoever inherits it: whoever
  // keeps the optimizers of a daemon that dies keeps its place, too.
  int succession() const { return succession_.get(); }

  std::string PathOf(const std::string& name) const { return path_ + "/" + name; }

 private:
  RuntimeDirectory(std::string path, memory::FileDescriptor directory)
      : path_(std::move(path)), directory_(std::move(directory)) {}
  absl::StatusOr<memory::FileDescriptor> OpenLock(const char* name) const;
  absl::Status Lock();
  absl::Status Succeed(memory::FileDescriptor inherited);

  const std::string path_;
  const memory::FileDescriptor directory_;
  memory::FileDescriptor lock_;
  memory::FileDescriptor succession_;
  std::vector<std::string> sockets_;
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_RUNTIME_DIRECTORY_H_
