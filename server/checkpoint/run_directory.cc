#include "server/checkpoint/run_directory.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

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

// The text of a part's index, if it is one of `moment` and `rank`.
absl::StatusOr<std::string> ReadPart(const std::string& directory, const RunMoment& moment, uint32_t rank,
                                     Index* index) {
  absl::StatusOr<std::string> text = ReadText(absl::StrCat(directory, "/", kIndexFile), kMaxIndexBytes);
  if (!text.ok()) return text.status();
  absl::StatusOr<Index> parsed = ParseIndex(*text);
  if (!parsed.ok()) return parsed.status();
  if (MomentOf(*parsed) != moment || parsed->rank != rank) {
    return absl::DataLossError(absl::StrCat(
        directory, " is of rank ", parsed->rank, " of ", parsed->ranks, " of run \"", parsed->run_name, "\" at step ",
        parsed->committed_steps, ", not of rank ", rank, " of ", moment.ranks, " of run \"", moment.run_name,
        "\" at step ", moment.committed_steps, "; restore an earlier checkpoint"));
  }
  *index = *std::move(parsed);
  return text;
}

absl::Status WriteRunIndex(const std::string& path, const std::string& text) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return FileError(errno, "removing", path);
  absl::StatusOr<File> file = File::Create(path, 0);
  if (!file.ok()) return file.status();
  if (absl::Status status = file->WriteAt(0, text.data(), text.size()); !status.ok()) return status;
  return file->Sync();
}

bool IsSealed(const std::string& target, const RunMoment& moment) {
  const absl::StatusOr<RunIndex> index = ReadRunIndex(target);
  return index.ok() && index->moment == moment;
}

}  // namespace

RunMoment MomentOf(const Index& index) {
  return {index.run_name, index.ranks, index.lineage, index.committed_steps};
}

std::string GrowingRun(const std::string& target) {
  const fs::path path(target);
  return path.parent_path() / absl::StrCat(".", path.filename().string(), ".ranks");
}

absl::StatusOr<RunIndex> ReadRunIndex(const std::string& directory) {
  absl::StatusOr<std::string> text = ReadText(absl::StrCat(directory, "/", kRunIndexFile), kMaxIndexBytes);
  if (!text.ok()) return text.status();
  return ParseRunIndex(*text);
}

absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& directory) {
  Checkpoint checkpoint;
  absl::StatusOr<RunIndex> run = ReadRunIndex(directory);
  if (absl::IsNotFound(run.status())) {
    absl::StatusOr<std::string> text = ReadText(absl::StrCat(directory, "/", kIndexFile), kMaxIndexBytes);
    if (!text.ok()) return text.status();
    absl::StatusOr<Index> index = ParseIndex(*text);
    if (!index.ok()) return In(directory, index.status());
    checkpoint.parts.push_back({directory, *std::move(index)});
    return checkpoint;
  }
  if (!run.ok()) return In(directory, run.status());
  for (uint32_t rank = 0; rank < run->moment.ranks; ++rank) {
    Part& part = checkpoint.parts.emplace_back();
    part.directory = absl::StrCat(directory, "/", PartName(rank, run->moment.ranks));
    absl::StatusOr<std::string> text = ReadPart(part.directory, run->moment, rank, &part.index);
    if (!text.ok()) {
      const std::string sentence = absl::StrCat("the part of rank ", rank, ": ", text.status().message());
      return absl::IsNotFound(text.status()) ? absl::DataLossError(sentence)
                                             : absl::Status(text.status().code(), sentence);
    }
    if (memory::Crc32(text->data(), text->size()) != run->index_crc32[rank]) {
      return absl::DataLossError(absl::StrCat(part.directory, "/", kIndexFile, " is damaged: its CRC-32 is not that of ",
                                              kRunIndexFile, "; restore an earlier checkpoint"));
    }
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
  if (fs::exists(fs::symlink_status(path, error))) return IsSealed(target, moment) ? absl::OkStatus() : Exists(target);
  const std::string growing = GrowingRun(target);
  return ::mkdir(growing.c_str(), 0755) == 0 || errno == EEXIST ? absl::OkStatus() : FileError(errno, "creating", growing);
}

bool HasPart(const std::string& target, const RunMoment& moment, uint32_t rank) {
  if (IsSealed(target, moment)) return true;
  const std::string part = absl::StrCat(GrowingRun(target), "/", PartName(rank, moment.ranks));
  Index index;
  const absl::StatusOr<std::string> text = ReadPart(part, moment, rank, &index);
  if (!text.ok() && !absl::IsNotFound(text.status())) {
    std::error_code ignored;
    fs::remove(fs::path(part) / kIndexFile, ignored);  // what is half removed is no checkpoint
    fs::remove_all(part, ignored);
  }
  return text.ok();
}

absl::StatusOr<Seal> SealRun(const std::string& target, const RunMoment& moment,
                             const std::function<uint64_t()>& sequence) {
  if (IsSealed(target, moment)) return Seal::kWasSealed;
  const std::string growing = GrowingRun(target);
  RunIndex run{.moment = moment, .algorithm = {}, .run = 0, .sequence = 0, .total_bytes = 0, .index_crc32 = {}};
  for (uint32_t rank = 0; rank < moment.ranks; ++rank) {
    Index index;
    const absl::StatusOr<std::string> text =
        ReadPart(absl::StrCat(growing, "/", PartName(rank, moment.ranks)), moment, rank, &index);
    if (!text.ok()) return IsSealed(target, moment) ? Seal::kWasSealed : Seal::kPartsMissing;
    if (rank == 0) {
      run.algorithm = index.algorithm;
      run.run = index.run;
    }
    run.total_bytes += index.total_bytes;
    run.index_crc32.push_back(memory::Crc32(text->data(), text->size()));
  }
  run.sequence = sequence();
  // Each rank that gets here writes a file of its own, so that none reads a half of another's.
  const std::string mine = absl::StrCat(growing, "/.", kRunIndexFile, ".", ::getpid(), ".", ::gettid());
  if (absl::Status status = WriteRunIndex(mine, EncodeRunIndex(run)); !status.ok()) {
    return IsSealed(target, moment) ? absl::StatusOr<Seal>(Seal::kWasSealed) : status;
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
  if (!status.ok()) return IsSealed(target, moment) ? absl::StatusOr<Seal>(Seal::kWasSealed) : status;
  if (status = SyncDirectory(fs::path(target).parent_path()); !status.ok()) return status;
  return Seal::kSealed;
}

}  // namespace superoffload::checkpoint
