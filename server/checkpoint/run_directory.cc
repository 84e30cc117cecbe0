#include "server/checkpoint/run_directory.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/files.h"
#include "server/memory/crc32.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

absl::Status Exists(const std::string& target) {
  return absl::AlreadyExistsError(absl::StrCat(target, " exists; remove it or choose another directory"));
}

// Of the tensors' files in a directory.
uint64_t TensorFileBytes(const std::string& directory) {
  std::error_code error;
  uint64_t bytes = 0;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code gone;
    if (entry->path().extension() != ".safetensors") continue;
    const uint64_t size = entry->file_size(gone);
    if (!gone) bytes += std::min(size, kMaxIndexBytes);  // more than that says no more
  }
  return bytes;
}

// A text, and the memory in which it is going to be parsed.
struct Text {
  std::string text;
  memory::MemoryReservation reservation;
};

absl::StatusOr<Text> ReadForParsing(const std::string& directory, const char* name, uint64_t max_bytes,
                                    const ReadScope& scope) {
  if (absl::Status status = scope.CheckGoesOn(); !status.ok()) return status;
  const std::string path = absl::StrCat(directory, "/", name);
  absl::StatusOr<File> file = File::Open(path);
  if (!file.ok()) return file.status();
  const absl::StatusOr<uint64_t> bytes = file->Bytes();
  if (!bytes.ok()) return bytes.status();
  if (*bytes > max_bytes) {
    return absl::DataLossError(absl::StrCat(path, " has ", *bytes,
                                            " bytes, but an index of what is beside it has at most ", max_bytes,
                                            "; restore an earlier checkpoint"));
  }
  absl::StatusOr<memory::MemoryReservation> reservation = scope.ReserveParsing(path, *bytes);
  if (!reservation.ok()) return reservation.status();
  Text text{std::string(*bytes, '\0'), *std::move(reservation)};
  if (absl::Status status = file->ReadAt(0, text.text.data(), text.text.size()); !status.ok()) return status;
  return text;
}

// The index of the optimizer's checkpoint in a directory, and the CRC-32 of its text.
absl::StatusOr<Part> ReadPart(const std::string& directory, const ReadScope& scope, uint32_t* crc32) {
  const absl::StatusOr<Text> text = ReadForParsing(
      directory, kIndexFile, std::min(scope.max_index_bytes, MaxIndexBytes(TensorFileBytes(directory))), scope);
  if (!text.ok()) return text.status();
  absl::StatusOr<Index> index = ParseIndex(text->text);
  if (!index.ok()) return index.status();
  absl::StatusOr<memory::MemoryReservation> kept = memory::MemoryReservation();
  if (text->text.size() > kFreeTextBytes) kept = scope.ReserveKept(directory, BytesOf(*index));
  if (!kept.ok()) return kept.status();
  *crc32 = memory::Crc32(text->text.data(), text->text.size());
  return Part{directory, *std::move(index), *std::move(kept)};
}

// The same, if it is one of `moment` and `rank`.
absl::StatusOr<Part> ReadPart(const std::string& directory, const RunMoment& moment, uint32_t rank,
                              const ReadScope& scope, uint32_t* crc32) {
  absl::StatusOr<Part> part = ReadPart(directory, scope, crc32);
  if (!part.ok()) return part;
  if (MomentOf(part->index) != moment || part->index.rank != rank) {
    return absl::DataLossError(absl::StrCat(
        directory, " is of rank ", part->index.rank, " of ", part->index.ranks, " of run \"", part->index.run_name,
        "\" at step ", part->index.committed_steps, ", not of rank ", rank, " of ", moment.ranks, " of run \"",
        moment.run_name, "\" at step ", moment.committed_steps, "; restore an earlier checkpoint"));
  }
  return part;
}

absl::Status WriteRunIndex(const std::string& path, const std::string& text) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return FileError(errno, "removing", path);
  absl::StatusOr<File> file = File::Create(path, 0, 0644);
  if (!file.ok()) return file.status();
  if (absl::Status status = file->WriteAt(0, text.data(), text.size()); !status.ok()) return status;
  return file->Sync();
}

bool IsSealed(const std::string& target, const RunMoment& moment, const ReadScope& scope) {
  const absl::StatusOr<RunIndex> index = ReadRunIndex(target, scope);
  return index.ok() && index->moment == moment;
}

}  // namespace

RunMoment MomentOf(const Index& index) { return {index.run_name, index.ranks, index.lineage, index.committed_steps}; }

std::string GrowingRun(const std::string& target) {
  const fs::path path(target);
  return path.parent_path() / absl::StrCat(".", path.filename().string(), ".ranks");
}

absl::StatusOr<RunIndex> ReadRunIndex(const std::string& directory, const ReadScope& scope) {
  const absl::StatusOr<Text> text =
      ReadForParsing(directory, kRunIndexFile, std::min(scope.max_index_bytes, kMaxRunIndexBytes), scope);
  if (!text.ok()) return text.status();
  return ParseRunIndex(text->text);
}

absl::StatusOr<Index> ReadIndex(const std::string& directory, const ReadScope& scope) {
  uint32_t crc32;
  absl::StatusOr<Part> part = ReadPart(directory, scope, &crc32);
  if (!part.ok()) return part.status();
  return std::move(part->index);
}

absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& directory, const ReadScope& scope) {
  Checkpoint checkpoint;
  uint32_t crc32;
  absl::StatusOr<RunIndex> run = ReadRunIndex(directory, scope);
  if (absl::IsNotFound(run.status())) {
    absl::StatusOr<Part> part = ReadPart(directory, scope, &crc32);
    if (absl::IsNotFound(part.status())) return part.status();
    if (!part.ok()) return In(directory, part.status());
    checkpoint.parts.push_back(*std::move(part));
    return checkpoint;
  }
  if (!run.ok()) return In(directory, run.status());
  for (uint32_t rank = 0; rank < run->moment.ranks; ++rank) {
    const std::string path = absl::StrCat(directory, "/", PartName(rank, run->moment.ranks));
    absl::StatusOr<Part> part = ReadPart(path, run->moment, rank, scope, &crc32);
    if (!part.ok()) {
      const std::string sentence = absl::StrCat("the part of rank ", rank, ": ", part.status().message());
      return absl::IsNotFound(part.status()) ? absl::DataLossError(sentence)
                                             : absl::Status(part.status().code(), sentence);
    }
    if (crc32 != run->index_crc32[rank]) {
      return absl::DataLossError(absl::StrCat(path, "/", kIndexFile, " is damaged: its CRC-32 is not that of ",
                                              kRunIndexFile, "; restore an earlier checkpoint"));
    }
    checkpoint.parts.push_back(*std::move(part));
  }
  checkpoint.run = *std::move(run);
  return checkpoint;
}

absl::Status BeginRun(const std::string& target, const RunMoment& moment) {
  const fs::path path(target);
  if (!path.is_absolute() || !path.has_filename()) {
    return absl::InvalidArgumentError(
        absl::StrCat("directory is \"", target, "\" but must be an absolute path that ends with a name"));
  }
  std::error_code error;
  if (fs::exists(fs::symlink_status(path, error))) {
    return IsSealed(target, moment, {}) ? absl::OkStatus() : Exists(target);
  }
  const std::string growing = GrowingRun(target);
  return ::mkdir(growing.c_str(), 0755) == 0 || errno == EEXIST ? absl::OkStatus()
                                                                : FileError(errno, "creating", growing);
}

bool HasPart(const std::string& target, const RunMoment& moment, uint32_t rank, const ReadScope& scope) {
  if (IsSealed(target, moment, scope)) return true;
  const std::string directory = absl::StrCat(GrowingRun(target), "/", PartName(rank, moment.ranks));
  uint32_t crc32;
  const absl::StatusOr<Part> part = ReadPart(directory, moment, rank, scope, &crc32);
  if (!part.ok() && !absl::IsNotFound(part.status())) {
    std::error_code ignored;
    fs::remove(fs::path(directory) / kIndexFile, ignored);  // what is half removed is no checkpoint
    fs::remove_all(directory, ignored);
  }
  return part.ok();
}

absl::StatusOr<Seal> SealRun(const std::string& target, const RunMoment& moment,
                             const std::function<uint64_t()>& sequence, const ReadScope& scope) {
  if (IsSealed(target, moment, scope)) return Seal::kWasSealed;
  const std::string growing = GrowingRun(target);
  RunIndex run{.moment = moment, .algorithm = {}, .run = 0, .sequence = 0, .total_bytes = 0, .index_crc32 = {}};
  for (uint32_t rank = 0; rank < moment.ranks; ++rank) {
    const absl::StatusOr<Part> part = ReadPart(absl::StrCat(growing, "/", PartName(rank, moment.ranks)), moment, rank,
                                               scope, &run.index_crc32.emplace_back());
    if (absl::IsResourceExhausted(part.status())) return part.status();
    if (!part.ok()) return IsSealed(target, moment, scope) ? Seal::kWasSealed : Seal::kPartsMissing;
    if (rank == 0) {
      run.algorithm = part->index.algorithm;
      run.run = part->index.run;
    }
    run.total_bytes += part->index.total_bytes;
  }
  run.sequence = sequence();
  // Each rank that gets here writes a file of its own, so that none reads a half of another's.
  const std::string mine = absl::StrCat(growing, "/.", kRunIndexFile, ".", ::getpid(), ".", ::gettid());
  if (absl::Status status = WriteRunIndex(mine, EncodeRunIndex(run)); !status.ok()) {
    return IsSealed(target, moment, scope) ? absl::StatusOr<Seal>(Seal::kWasSealed) : status;
  }
  const std::string named = absl::StrCat(growing, "/", kRunIndexFile);
  absl::Status status;
  if (::rename(mine.c_str(), named.c_str()) != 0) {
    status = FileError(errno, "renaming to", named);
  } else if (status = SyncDirectory(growing);
             status.ok() && ::renameat2(AT_FDCWD, growing.c_str(), AT_FDCWD, target.c_str(), RENAME_NOREPLACE) != 0) {
    // File systems without the flag: the check at the start has to do.
    if (errno == EEXIST) status = Exists(target);
    if (status.ok() && (errno != EINVAL || ::rename(growing.c_str(), target.c_str()) != 0)) {
      status = FileError(errno, "renaming to", target);
    }
  }
  if (!status.ok()) return IsSealed(target, moment, scope) ? absl::StatusOr<Seal>(Seal::kWasSealed) : status;
  if (status = SyncDirectory(fs::path(target).parent_path()); !status.ok()) return status;
  return Seal::kSealed;
}

}  // namespace superoffload::checkpoint
