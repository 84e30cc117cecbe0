#include "server/checkpoint/writer.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/checkpoint/act_as.h"
#include "server/checkpoint/files.h"
#include "server/checkpoint/shard_plan.h"
#include "server/memory/crc32.h"
#include "server/memory/thread.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

// Enough to keep a fast disk busy; checksums cost most.
constexpr size_t kMaxThreads = 8;

// The hidden directory in which a checkpoint grows; removed unless it is published.
class PartialDirectory {
 public:
  static absl::StatusOr<std::unique_ptr<PartialDirectory>> Create(const fs::path& target) {
    if (!target.is_absolute() || !target.has_filename()) {
      return absl::InvalidArgumentError(
          absl::StrCat("directory is \"", target.string(), "\" but must be an absolute path that ends with a name"));
    }
    std::error_code error;
    if (fs::exists(fs::symlink_status(target, error))) return Exists(target);
    const fs::path path = target.parent_path() / absl::StrCat(".", target.filename().string(), ".partial");
    // Whoever holds the lock is alive; what nobody holds was left by a daemon that was killed.
    if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) return FileError(errno, "creating", path);
    memory::FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!fd.valid()) return FileError(errno, "opening", path);
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("another checkpoint is being written to ", target.string(), "; choose another directory"));
    }
    for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) fs::remove_all(entry, error);
    return std::unique_ptr<PartialDirectory>(new PartialDirectory(target, path, std::move(fd)));
  }

  ~PartialDirectory() {
    std::error_code ignored;
    if (!published_) fs::remove_all(path_, ignored);
  }

  absl::Status Publish() {
    if (absl::Status status = SyncDirectory(path_); !status.ok()) return status;
    if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), RENAME_NOREPLACE) != 0) {
      // File systems without the flag: the check at the start has to do.
      if (errno == EEXIST) return Exists(target_);
      if (errno != EINVAL || ::rename(path_.c_str(), target_.c_str()) != 0) {
        return FileError(errno, "renaming to", target_);
      }
    }
    published_ = true;
    return SyncDirectory(target_.parent_path());
  }

  std::string operator/(const std::string& file) const { return path_ / file; }

 private:
  PartialDirectory(fs::path target, fs::path path, memory::FileDescriptor lock)
      : target_(std::move(target)), path_(std::move(path)), lock_(std::move(lock)) {}

  static absl::Status Exists(const fs::path& target) {
    return absl::AlreadyExistsError(absl::StrCat(target.string(), " exists; remove it or choose another directory"));
  }

  const fs::path target_, path_;
  const memory::FileDescriptor lock_;
  bool published_ = false;
};

// Ends the snapshot on every way out.
class SnapshotScope {
 public:
  explicit SnapshotScope(engine::StepEngine& engine) : engine_(engine) {}
  ~SnapshotScope() { End(); }
  void End() {
    if (!std::exchange(ended_, true)) engine_.EndSnapshot();
  }

 private:
  engine::StepEngine& engine_;
  bool ended_ = false;
};

class Writer {
 public:
  Writer(optimizer::HostedOptimizer& optimizer, const engine::StepEngine::Moment& moment, const PartialDirectory& to,
         bool as_user, uint64_t sequence, const std::atomic<bool>& cancelled, Progress* progress)
      : optimizer_(optimizer),
        moment_(moment),
        directory_(to),
        as_user_(as_user),
        sequence_(sequence),
        cancelled_(cancelled),
        progress_(progress) {}

  absl::Status Prepare() {
    plan_ = PlanShards(optimizer_.spec(), optimizer_.layout(), Metadata());
    pieces_.resize(plan_.shards.size());
    uint64_t total = 0;
    for (const Shard& shard : plan_.shards) {
      absl::StatusOr<File> file = File::Create(directory_ / shard.file, shard.bytes);
      if (!file.ok()) return file.status();
      if (absl::Status status = file->WriteAt(0, shard.header.data(), shard.header.size()); !status.ok()) return status;
      files_.push_back(*std::move(file));
      total += shard.bytes - shard.header.size();
    }
    progress_->bytes_total = total;
    return absl::OkStatus();
  }

  // Every bucket, by this thread and others.
  absl::Status WriteBuckets() {
    const size_t count = std::clamp<size_t>(std::thread::hardware_concurrency() / 4, 2, kMaxThreads);
    std::vector<std::thread> threads;
    const auto write = [this] {
      absl::Status status = as_user_ ? ActAs(optimizer_.id().uid) : absl::OkStatus();
      if (status.ok()) status = WriteClaimedBuckets();
      absl::MutexLock lock(&mu_);
      status_.Update(status);
    };
    for (size_t i = 0; i + 1 < count; ++i) {
      absl::StatusOr<std::thread> thread = memory::StartThread("so-writer", write);
      if (!thread.ok()) break;  // fewer do
      threads.push_back(*std::move(thread));
    }
    write();
    for (std::thread& thread : threads) thread.join();
    absl::MutexLock lock(&mu_);
    return status_;
  }

  absl::Status Finish() {
    Index index{.optimizer = optimizer_.id().name,
                .run = optimizer_.run(),
                .sequence = sequence_,
                .step = moment_.statistics.step,
                .committed_steps = moment_.statistics.committed_steps,
                .groups = moment_.groups,
                .parameter_groups = {},
                .tensor_files = {},
                .file_crc32 = {},
                .total_bytes = progress_->bytes_total};
    for (size_t i = 0; i < files_.size(); ++i) {
      if (absl::Status status = files_[i].Sync(); !status.ok()) return status;
      index.file_crc32[plan_.shards[i].file] = FileCrc32(i);
    }
    for (size_t p = 0; p < optimizer_.spec().parameters.size(); ++p) {
      const engine::ParameterSpec& parameter = optimizer_.spec().parameters[p];
      index.parameter_groups[parameter.name] = parameter.group;
      for (size_t array = 0; array < kArrays.size(); ++array) {
        index.tensor_files[absl::StrCat(kArrays[array], ".", parameter.name)] =
            plan_.shards[plan_.places[array][p].shard].file;
      }
    }
    const std::string text = EncodeIndex(index);
    absl::StatusOr<File> file = File::Create(directory_ / kIndexFile, 0);
    if (!file.ok()) return file.status();
    if (absl::Status status = file->WriteAt(0, text.data(), text.size()); !status.ok()) return status;
    return file->Sync();
  }

 private:
  struct WrittenPiece {
    uint64_t offset;
    size_t bytes;
    uint32_t crc32;
  };

  std::map<std::string, std::string> Metadata() const {
    return {{"format", "pt"},
            {"optimizer", optimizer_.id().name},
            {"step", absl::StrCat(moment_.statistics.step)},
            {"committed_steps", absl::StrCat(moment_.statistics.committed_steps)},
            {"hyperparameters", HyperparametersText(moment_.groups)}};
  }

  bool Stopped() {
    absl::MutexLock lock(&mu_);
    return !status_.ok();
  }

  absl::Status WriteClaimedBuckets() {
    while (!Stopped()) {
      const std::optional<uint32_t> bucket = optimizer_.engine().ClaimSnapshotBucket();
      if (!bucket) break;
      for (const Piece& piece : plan_.bucket_pieces[*bucket]) {
        for (size_t array = 0; array < kArrays.size(); ++array) {
          if (cancelled_) return absl::CancelledError("the checkpoint was cancelled");
          if (absl::Status status = WritePiece(piece, array); !status.ok()) return status;
        }
      }
      optimizer_.engine().BucketSaved(*bucket);
    }
    return absl::OkStatus();
  }

  absl::Status WritePiece(const Piece& piece, size_t array) {
    const engine::Layout& layout = optimizer_.layout();
    const std::byte* const data = optimizer_.memory().state.data() + layout.state_array_offsets[array] +
                                  (layout.placements[piece.parameter].state_offset + piece.first) * sizeof(float);
    const ShardPlan::Place& place = plan_.places[array][piece.parameter];
    const WrittenPiece written{place.offset + piece.first * sizeof(float), piece.elements * sizeof(float),
                               memory::Crc32(data, piece.elements * sizeof(float))};
    if (absl::Status status = files_[place.shard].WriteAt(written.offset, data, written.bytes); !status.ok()) {
      return status;
    }
    progress_->bytes_written += written.bytes;
    absl::MutexLock lock(&mu_);
    pieces_[place.shard].push_back(written);
    return absl::OkStatus();
  }

  uint32_t FileCrc32(size_t shard) {
    absl::MutexLock lock(&mu_);
    std::vector<WrittenPiece>& pieces = pieces_[shard];
    std::sort(pieces.begin(), pieces.end(),
              [](const WrittenPiece& a, const WrittenPiece& b) { return a.offset < b.offset; });
    const std::string& header = plan_.shards[shard].header;
    uint32_t crc32 = memory::Crc32(header.data(), header.size());
    for (const WrittenPiece& piece : pieces) crc32 = memory::Crc32Combine(crc32, piece.crc32, piece.bytes);
    return crc32;
  }

  optimizer::HostedOptimizer& optimizer_;
  const engine::StepEngine::Moment& moment_;
  const PartialDirectory& directory_;
  const bool as_user_;
  const uint64_t sequence_;
  const std::atomic<bool>& cancelled_;
  Progress* const progress_;
  ShardPlan plan_;
  std::vector<File> files_;
  absl::Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);                            // the first error
  std::vector<std::vector<WrittenPiece>> pieces_ ABSL_GUARDED_BY(mu_);  // per shard
};

absl::Status Write(optimizer::HostedOptimizer& optimizer, const engine::StepEngine::Moment& moment,
                   const std::string& target, const WriteOptions& options, const std::atomic<bool>& cancelled,
                   Progress* progress) {
  SnapshotScope snapshot(optimizer.engine());
  absl::StatusOr<std::unique_ptr<PartialDirectory>> directory = PartialDirectory::Create(target);
  if (!directory.ok()) return directory.status();
  Writer writer(optimizer, moment, **directory, options.as_user, options.sequence(), cancelled, progress);
  if (absl::Status status = writer.Prepare(); !status.ok()) return status;
  if (absl::Status status = writer.WriteBuckets(); !status.ok()) return status;
  snapshot.End();  // syncing takes long and concerns no step
  if (absl::Status status = writer.Finish(); !status.ok()) return status;
  return (*directory)->Publish();
}

}  // namespace

optimizer::CheckpointReport WriteCheckpoint(optimizer::HostedOptimizer& optimizer, const WriteOptions& options,
                                            const std::atomic<bool>& cancelled, Progress* progress) {
  optimizer::CheckpointReport report;
  const absl::StatusOr<engine::StepEngine::Moment> moment =
      optimizer.engine().WaitSnapshot(options.committed_steps, cancelled);
  if (!moment.ok()) {
    report.status = moment.status();
    return report;
  }
  const absl::Time start = absl::Now();
  report.committed_steps = progress->committed_steps = moment->statistics.committed_steps;
  report.directory = options.directory(report.committed_steps);
  report.status = Write(optimizer, *moment, report.directory, options, cancelled, progress);
  report.bytes = progress->bytes_written;
  report.duration = absl::Now() - start;
  return report;
}

}  // namespace superoffload::checkpoint
