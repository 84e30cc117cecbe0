#include "server/checkpoint/writer.h"

#include <algorithm>
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
#include "server/checkpoint/partial_directory.h"
#include "server/checkpoint/run_directory.h"
#include "server/checkpoint/shard_plan.h"
#include "server/memory/crc32.h"
#include "server/memory/thread.h"

namespace superoffload::checkpoint {
namespace {

// Enough to keep a fast disk busy; checksums cost most.
constexpr size_t kMaxThreads = 8;

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

std::vector<NamedScalars> NamedGroups(const optimizer::HostedOptimizer& optimizer,
                                      const engine::StepEngine::Moment& moment) {
  const std::span<const kernels::Scalar> scalars = optimizer.spec().algorithm->scalars;
  std::vector<NamedScalars> groups;
  for (const engine::Scalars& group : moment.groups) {
    NamedScalars& named = groups.emplace_back();
    for (size_t i = 0; i < scalars.size(); ++i) named[std::string(scalars[i].name)] = group[i];
  }
  return groups;
}

class Writer {
 public:
  Writer(optimizer::HostedOptimizer& optimizer, const engine::StepEngine::Moment& moment, const PartialDirectory& to,
         const WriteOptions& options, uint64_t sequence, const std::atomic<bool>& cancelled, Progress* progress)
      : optimizer_(optimizer),
        moment_(moment),
        directory_(to),
        as_user_(options.as_user),
        sequence_(sequence),
        lineage_(optimizer.lineage()),
        run_(optimizer.run()),
        seed_(optimizer.seed()),
        doubts_(options.doubts),
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
    const engine::OptimizerSpec& spec = optimizer_.spec();
    Index index;
    index.optimizer = optimizer_.id().name;
    index.algorithm = spec.algorithm->name;
    index.run_name = spec.member.run;
    index.rank = spec.member.rank;
    index.ranks = spec.member.ranks;
    index.lineage = lineage_;
    index.run = run_;
    if (spec.algorithm->rounds_stochastically()) index.seed = seed_;
    index.sequence = sequence_;
    index.step = moment_.statistics.step;
    index.committed_steps = moment_.statistics.committed_steps;
    index.groups = NamedGroups(optimizer_, moment_);
    index.blocks = BlockedArraysOf(*spec.algorithm);
    index.total_bytes = progress_->bytes_total;
    for (size_t i = 0; i < files_.size(); ++i) {
      if (absl::Status status = files_[i].Sync(); !status.ok()) return status;
      index.file_crc32[plan_.shards[i].file] = FileCrc32(i);
    }
    for (size_t p = 0; p < spec.parameters.size(); ++p) {
      const engine::ParameterSpec& parameter = spec.parameters[p];
      index.parameter_groups[parameter.name] = parameter.group;
      const uint64_t steps = moment_.parameter_steps[p];
      if (steps != index.committed_steps) index.parameter_steps[parameter.name] = steps;
      if (!parameter.global_shape.empty()) {
        index.shards[parameter.name] = {parameter.global_shape, parameter.global_offset};
      }
      const engine::StateFormat& format = optimizer_.layout().FormatOf(optimizer_.layout().placements[p]);
      for (size_t array = 0; array < format.arrays.size(); ++array) {
        index.tensor_files[TensorName(format.arrays[array].array, parameter.name)] =
            plan_.shards[plan_.places[p][array].shard].file;
      }
    }
    if (doubts_.empty()) return WriteText(kIndexFile, EncodeIndex(index));
    if (absl::Status status = WriteText(kDoubtfulIndexFile, EncodeIndex(index)); !status.ok()) return status;
    return WriteText(kDoubtsFile, absl::StrCat(doubts_, "\n\nTo restore it all the same, rename ", kDoubtfulIndexFile,
                                               " to ", kIndexFile, ".\n"));
  }

 private:
  absl::Status WriteText(const char* name, const std::string& text) const {
    absl::StatusOr<File> file = File::Create(directory_ / name, 0);
    if (!file.ok()) return file.status();
    if (absl::Status status = file->WriteAt(0, text.data(), text.size()); !status.ok()) return status;
    return file->Sync();
  }

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
            {"algorithm", std::string(optimizer_.spec().algorithm->name)},
            {"hyperparameters", HyperparametersText(NamedGroups(optimizer_, moment_))}};
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
        for (size_t array = 0; array < plan_.places[piece.parameter].size(); ++array) {
          if (cancelled_) return absl::CancelledError("the checkpoint was cancelled");
          if (absl::Status status = WritePiece(piece, array); !status.ok()) return status;
        }
      }
      optimizer_.engine().BucketSaved(*bucket);
    }
    return absl::OkStatus();
  }

  absl::Status WritePiece(const Piece& piece, size_t array) {
    const engine::Placement& placement = optimizer_.layout().placements[piece.parameter];
    const engine::StateFormat& format = optimizer_.layout().FormatOf(placement);
    const kernels::StateArray& written_array = format.arrays[array].array;
    const size_t bytes = written_array.Bytes(piece.elements);
    const std::byte* const data =
        optimizer_.memory().state.data() + format.Byte(array, placement.state_offset + piece.first);
    const ShardPlan::Place& place = plan_.places[piece.parameter][array];
    const WrittenPiece written{place.offset + written_array.Bytes(piece.first), bytes, memory::Crc32(data, bytes)};
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
  const uint64_t sequence_, lineage_, run_, seed_;
  const std::string doubts_;
  const std::atomic<bool>& cancelled_;
  Progress* const progress_;
  ShardPlan plan_;
  std::vector<File> files_;
  absl::Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);                            // the first error
  std::vector<std::vector<WrittenPiece>> pieces_ ABSL_GUARDED_BY(mu_);  // per shard
};

// Whether `target` is a checkpoint of this moment. A restore makes another lineage, so no other state has that.
bool IsOf(const optimizer::HostedOptimizer& optimizer, const engine::StepEngine::Moment& moment,
          const std::string& target, Progress* progress) {
  const absl::StatusOr<Index> index = ReadIndex(target, ReadScope::OfOwn(optimizer));
  const bool same =
      index.ok() && index->optimizer == optimizer.id().name && index->run != 0 && index->run == optimizer.run() &&
      index->lineage == optimizer.lineage() && index->step == moment.statistics.step &&
      index->committed_steps == moment.statistics.committed_steps && index->groups == NamedGroups(optimizer, moment);
  if (same) progress->bytes_total = progress->bytes_written = index->total_bytes;
  return same;
}

absl::Status Write(optimizer::HostedOptimizer& optimizer, const engine::StepEngine::Moment& moment,
                   const std::string& target, const WriteOptions& options, uint64_t sequence,
                   const std::atomic<bool>& cancelled, Progress* progress) {
  SnapshotScope snapshot(optimizer.engine());
  absl::StatusOr<std::unique_ptr<PartialDirectory>> directory = PartialDirectory::Create(target);
  if (options.again && absl::IsAlreadyExists(directory.status()) && IsOf(optimizer, moment, target, progress)) {
    return absl::OkStatus();
  }
  if (!directory.ok()) return directory.status();
  Writer writer(optimizer, moment, **directory, options, sequence, cancelled, progress);
  if (absl::Status status = writer.Prepare(); !status.ok()) return status;
  if (absl::Status status = writer.WriteBuckets(); !status.ok()) return status;
  snapshot.End();  // syncing takes long and concerns no step
  if (absl::Status status = writer.Finish(); !status.ok()) return status;
  return (*directory)->Publish();
}

// Where this rank's part of `directory` grows.
absl::StatusOr<std::string> BeginPart(const optimizer::HostedOptimizer& optimizer, const RunMoment& moment,
                                      const std::string& directory) {
  if (absl::Status status = BeginRun(directory, moment); !status.ok()) return status;
  return absl::StrCat(GrowingRun(directory), "/", PartName(optimizer.spec().member.rank, moment.ranks));
}

// The part of a rank of a run, unless it is there, and the run if it is the last one.
void WriteRun(optimizer::HostedOptimizer& optimizer, const WriteOptions& options, const std::atomic<bool>& cancelled,
              Progress* progress, optimizer::CheckpointReport* report) {
  const engine::RunMember& member = optimizer.spec().member;
  const RunMoment moment{member.run, member.ranks, optimizer.lineage(),
                         report->committed_steps = options.committed_steps};
  report->directory = options.directory(moment.committed_steps);
  absl::Time start = absl::Now();
  if (options.next != 0 || !HasPart(report->directory, moment, member.rank, ReadScope::OfOwn(optimizer))) {
    const absl::StatusOr<engine::StepEngine::Moment> snapshot = optimizer.engine().WaitSnapshot(
        {.committed_steps = options.committed_steps, .exact = true, .next = options.next}, cancelled);
    report->status = snapshot.status();
    if (!snapshot.ok()) return;
    start = absl::Now();
    progress->committed_steps = options.committed_steps;
    absl::StatusOr<std::string> part = BeginPart(optimizer, moment, report->directory);
    if (!part.ok()) {
      report->status = part.status();
      optimizer.engine().EndSnapshot();
      return;
    }
    report->status = Write(optimizer, *snapshot, *part, options, /*sequence=*/0, cancelled, progress);
    report->bytes = progress->bytes_written;
    if (!report->status.ok()) return;
  }
  const absl::StatusOr<Seal> seal = SealRun(report->directory, moment, options.sequence, ReadScope::Of(optimizer));
  report->status = seal.status();
  report->duration = absl::Now() - start;
  if (!seal.ok()) return;
  report->run_whole = *seal != Seal::kPartsMissing;
  report->sealed = *seal == Seal::kSealed;
}

}  // namespace

optimizer::CheckpointReport WriteCheckpoint(optimizer::HostedOptimizer& optimizer, const WriteOptions& options,
                                            const std::atomic<bool>& cancelled, Progress* progress) {
  optimizer::CheckpointReport report;
  if (options.of_run) {
    WriteRun(optimizer, options, cancelled, progress, &report);
    return report;
  }
  const uint64_t sequence = options.sequence();  // may look at every older checkpoint, which no step is to wait for
  const absl::StatusOr<engine::StepEngine::Moment> moment =
      optimizer.engine().WaitSnapshot(options.committed_steps, cancelled);
  if (!moment.ok()) {
    report.status = moment.status();
    return report;
  }
  const absl::Time start = absl::Now();
  report.committed_steps = progress->committed_steps = moment->statistics.committed_steps;
  report.directory = options.directory(report.committed_steps);
  report.status = Write(optimizer, *moment, report.directory, options, sequence, cancelled, progress);
  report.bytes = progress->bytes_written;
  report.duration = absl::Now() - start;
  return report;
}

}  // namespace superoffload::checkpoint
