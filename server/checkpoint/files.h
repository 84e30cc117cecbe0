// Whole reads and writes of files, with statuses that name the path and the remedy.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_FILES_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_FILES_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/memory/shared_memory.h"

namespace superoffload::checkpoint {

// What a failed call on `path` means. RESOURCE_EXHAUSTED when the disk is full.
absl::Status FileError(int error, const std::string& action, const std::string& path);

// What tells a file from another one that has its name later.
struct FileIdentity {
  uint64_t device = 0, inode = 0, bytes = 0;
  bool operator==(const FileIdentity&) const = default;
};

class File {
 public:
  // Creates what must not exist, with `bytes` bytes of disk reserved where the file system can. Unless `mode` says
  // more, nobody but its user reads it; PartialDirectory lets others once it is whole.
  static absl::StatusOr<File> Create(const std::string& path, uint64_t bytes, mode_t mode = 0600);
  static absl::StatusOr<File> Open(const std::string& path);

  absl::Status WriteAt(uint64_t offset, const void* data, size_t bytes) const;
  // OUT_OF_RANGE: the file ends before.
  absl::Status ReadAt(uint64_t offset, void* data, size_t bytes) const;
  absl::Status Sync() const;
  absl::StatusOr<uint64_t> Bytes() const;
  absl::StatusOr<FileIdentity> Identity() const;
  const std::string& path() const { return path_; }

 private:
  File(std::string path, memory::FileDescriptor fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  std::string path_;
  memory::FileDescriptor fd_;
};

// The text of a file. DATA_LOSS: it is larger than `max_bytes`.
absl::StatusOr<std::string> ReadText(const std::string& path, uint64_t max_bytes);

// The status of a failed step, with the place where it failed before its message.
absl::Status In(const std::string& where, const absl::Status& status);

// Makes what was created, renamed or removed in a directory last.
absl::Status SyncDirectory(const std::string& path);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_FILES_H_
