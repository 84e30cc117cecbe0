#include "server/checkpoint/file_pool.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace superoffload::checkpoint {

absl::StatusOr<FileIdentity> FilePool::Open(const std::string& path) {
  absl::StatusOr<File> file = File::Open(path);
  if (!file.ok()) return file.status();
  const absl::StatusOr<FileIdentity> identity = file->Identity();
  if (!identity.ok()) return identity.status();
  if (open_.size() >= kMaxOpen) open_.pop_back();
  open_.push_front({*std::move(file), *identity});
  return *identity;
}

absl::StatusOr<const File*> FilePool::Get(const std::string& path, const FileIdentity& known) {
  const auto found = std::find_if(open_.begin(), open_.end(), [&](const Opened& opened) {
    return opened.identity == known && opened.file.path() == path;
  });
  if (found != open_.end()) {
    open_.splice(open_.begin(), open_, found);
    return &open_.front().file;
  }
  const absl::StatusOr<FileIdentity> identity = Open(path);
  if (!identity.ok()) return identity.status();
  if (*identity != known) {
    return absl::DataLossError(
        absl::StrCat(path, " was replaced while it was read; leave checkpoints alone that are in use"));
  }
  return &open_.front().file;
}

absl::StatusOr<PooledFile> PooledFile::Open(FilePool* pool, const std::string& path) {
  const absl::StatusOr<FileIdentity> identity = pool->Open(path);
  if (!identity.ok()) return identity.status();
  return PooledFile(pool, path, *identity);
}

absl::Status PooledFile::ReadAt(uint64_t offset, void* data, size_t bytes) const {
  const absl::StatusOr<const File*> file = pool_->Get(path_, identity_);
  return file.ok() ? (*file)->ReadAt(offset, data, bytes) : file.status();
}

}  // namespace superoffload::checkpoint
