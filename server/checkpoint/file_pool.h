// Files that are read by turns, however many there are: a checkpoint may have thousands, and the daemon only so many
// descriptors. Those that were used last stay open.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_FILE_POOL_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_FILE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/files.h"

namespace superoffload::checkpoint {

// Not thread-safe.
class FilePool {
 public:
  static constexpr size_t kMaxOpen = 16;

  FilePool() = default;
  FilePool(const FilePool&) = delete;
  FilePool& operator=(const FilePool&) = delete;

  // Valid until the next call. DATA_LOSS: `path` names another file than `known` by now.
  absl::StatusOr<const File*> Get(const std::string& path, const FileIdentity& known);

  // Opens what `path` names now.
  absl::StatusOr<FileIdentity> Open(const std::string& path);

 private:
  struct Opened {
    File file;
    FileIdentity identity;
  };
  std::list<Opened> open_;  // the last used one first
};

// One of them. Must not outlive the pool.
class PooledFile {
 public:
  // Opens it, so that it is known to be there, and which one it is.
  static absl::StatusOr<PooledFile> Open(FilePool* pool, const std::string& path);

  // OUT_OF_RANGE: the file ends before. DATA_LOSS: another one has its name by now.
  absl::Status ReadAt(uint64_t offset, void* data, size_t bytes) const;
  uint64_t bytes() const { return identity_.bytes; }  // when it was opened
  const std::string& path() const { return path_; }

 private:
  PooledFile(FilePool* pool, std::string path, const FileIdentity& identity)
      : pool_(pool), path_(std::move(path)), identity_(identity) {}

  FilePool* pool_;
  std::string path_;
  FileIdentity identity_;
};

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_FILE_POOL_H_
