#include "tests/fault/ranks/rank.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/fault/ranks/pair.h"

namespace superoffload::fault {
namespace {

constexpr double kMaxGradNorm = 40;  // clips most steps, so that each rank's weights depend on the other's gradients
constexpr std::chrono::seconds kAgreementPatience{60};

// Uneven shards of two parameters; the larger one has several buckets.
std::array<uint64_t, 2> ShardSizes(uint32_t rank) {
  return rank == 0 ? std::array<uint64_t, 2>{40000, 300} : std::array<uint64_t, 2>{17000, 1};
}

std::string NameOf(uint32_t rank) { return absl::StrCat("run.", rank, "-of-2"); }

// In [-1, 1), of step `t` and element `i`.
float Noise(uint64_t t, uint64_t i) {
  uint64_t x = (t * 0x9e3779b97f4a7c15u) ^ (i * 0xbf58476d1ce4e5b9u);
  x = (x ^ (x >> 31)) * 0x94d049bb133111ebu;
  return static_cast<float>(static_cast<int64_t>(x >> 33) - (int64_t{1} << 30)) / static_cast<float>(1 << 30);
}

template <typename T>
std::string Bytes(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

struct Contribution {
  uint64_t step;
  double sum_of_squares;
};

// A rank in one generation of the process group.
class Generation {
 public:
  Generation(const RankOptions& options, Tally& tally, std::mt19937_64& random, Client& client, Pair pair)
      : options_(options), tally_(tally), random_(random), client_(client), pair_(std::move(pair)) {}

  bool agreed() const { return agreed_; }

  // Returns when all steps are committed, or when somebody is gone.
  absl::Status Train() {
    if (absl::Status status = ReachAgreement(); !status.ok()) return status;
    v1::AttachOptimizerRequest request;
    request.set_name(NameOf(options_.rank));
    request.set_sync(v1::SYNC_PULL);
    absl::StatusOr<std::unique_ptr<Attachment>> trainer = client_.Attach(request);
    if (!trainer.ok()) return trainer.status();
    uint64_t committed = (*trainer)->optimizer().committed_steps();
    while (committed < options_.steps) {
      absl::StatusOr<superoffload_verdict> verdict = Step(**trainer, committed + 1);
      if (!verdict.ok()) return verdict.status();
      ++(verdict->committed_steps == committed ? tally_.skips : tally_.commits);
      committed = verdict->committed_steps;
    }
    // The other one may still need this rank's process to be there: it leaves when both are done.
    return pair_.Gather("done").status();
  }

 private:
  absl::Status ReachAgreement() {
    absl::StatusOr<v1::RunReport> report = client_.ReportRun(NameOf(options_.rank));
    if (!report.ok()) return report.status();
    Pause();
    const auto messages = pair_.Gather(report->SerializeAsString());
    if (!messages.ok()) return messages.status();
    std::array<v1::RunReport, 2> reports;
    for (size_t rank = 0; rank < 2; ++rank) reports[rank].ParseFromString((*messages)[rank]);
    absl::StatusOr<v1::ResolveStepRequest> decision = Agree(reports, options_.rank);
    if (!decision.ok()) return decision.status();
    ++tally_.agreements;
    agreed_ = true;
    Pause();
    if (decision->attempt() == 0) return absl::OkStatus();
    decision->set_name(NameOf(options_.rank));
    if (absl::StatusOr<v1::Optimizer> resolved = client_.ResolveStep(*decision); !resolved.ok()) {
      return resolved.status();
    }
    ++(decision->has_commit() ? tally_.rolled_forward : tally_.abandoned);
    Pause();
    return absl::OkStatus();
  }

  absl::StatusOr<superoffload_verdict> Step(Attachment& trainer, uint64_t t) {
    if (absl::Status status = trainer.BeginStep(); !status.ok()) return status;
    if (absl::Status status = Backward(trainer, t); !status.ok()) return status;
    if (absl::Status status = trainer.PrepareStep(1, kMaxGradNorm); !status.ok()) return status;
    const absl::StatusOr<double> sum = trainer.WaitPrepared();
    if (!sum.ok()) return sum.status();
    Pause();
    const auto messages = pair_.Gather(Bytes(Contribution{t, *sum}));
    if (!messages.ok()) return messages.status();
    double total = 0;
    for (const std::string& message : *messages) {
      Contribution theirs{};
      if (message.size() != sizeof(theirs)) return absl::InternalError("a contribution of another kind");
      std::memcpy(&theirs, message.data(), sizeof(theirs));
      if (theirs.step != t) return absl::InternalError(absl::StrCat("ranks at steps ", t, " and ", theirs.step));
      total += theirs.sum_of_squares;
    }
    Pause();
    if (absl::Status status = trainer.EndPreparedStep(total, 1, kMaxGradNorm); !status.ok()) return status;
    return trainer.WaitStep();
  }

  // The gradients of committed step `t` depend on the parameters and on t alone. Now and then this rank's first one is
  // NaN; the step is then tried again.
  absl::Status Backward(Attachment& trainer, uint64_t t) {
    const bool bad = options_.seed != 0 && random_() % 16 == 0;
    for (size_t parameter : {1, 0}) {
      const auto weights = trainer.Parameter<float>(parameter), gradients = trainer.Gradient<float>(parameter);
      for (size_t i = 0; i < weights.size(); ++i) gradients[i] = weights[i] + Noise(t, 2 * i + options_.rank);
      if (bad) gradients[0] = std::numeric_limits<float>::quiet_NaN();
      if (absl::Status status = trainer.GradientReady(parameter); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Holds the narrow places of the protocol open for a while, now and then.
  void Pause() const {
    if (options_.seed != 0 && random_() % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 4000));
    }
  }

  const RankOptions& options_;
  Tally& tally_;
  std::mt19937_64& random_;
  Client& client_;
  const Pair pair_;
  bool agreed_ = false;
};

// Somebody died, or has not yet noticed that somebody did.
bool Passes(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsFailedPrecondition(status) || absl::IsUnauthenticated(status) ||
         absl::IsAborted(status) || absl::IsCancelled(status);
}

}  // namespace

Tally& MapTally(const std::string& path) {
  const FileDescriptor fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd.valid() || ::ftruncate(fd.get(), sizeof(Tally)) != 0) std::abort();
  void* const memory = ::mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) std::abort();
  return *static_cast<Tally*>(memory);
}

void CreateShard(Client& client, uint32_t rank, uint64_t lineage) {
  v1::CreateOptimizerRequest request;
  request.set_name(NameOf(rank));
  request.set_bucket_bytes(64 << 10);
  request.set_algorithm("adamw");
  request.set_lineage(lineage);
  request.mutable_member()->set_run("run");
  request.mutable_member()->set_rank(rank);
  request.mutable_member()->set_ranks(2);
  SetScalar(request.add_groups(), "lr", 0.01);
  for (const uint64_t elements : ShardSizes(rank)) {
    v1::Parameter* parameter = request.add_parameters();
    parameter->set_name(absl::StrCat("parameter", request.parameters_size()));
    parameter->add_shape(elements);
    parameter->set_dtype(v1::DATA_TYPE_FLOAT32);
  }
  if (const auto created = client.CreateOptimizer(request); !created.ok()) {
    std::fprintf(stderr, "%s\n", created.status().ToString().c_str());
    std::abort();
  }
  v1::AttachOptimizerRequest attach;
  attach.set_name(NameOf(rank));
  attach.set_sync(v1::SYNC_PUSH);
  const auto attachment = client.Attach(attach);
  if (!attachment.ok() || !(*attachment)->PushParameters().ok()) std::abort();  // zeros
}

int RunRank(const RankOptions& options) {
  Tally& tally = MapTally(options.directory + "/tally");
  std::mt19937_64 random(options.seed);
  const Meeting meeting(options.directory + "/meeting", options.rank);
  auto deadline = std::chrono::steady_clock::now() + kAgreementPatience;
  while (std::chrono::steady_clock::now() < deadline) {
    absl::Status status;
    if (auto client = Client::Connect(options.endpoint); client.ok()) {
      absl::StatusOr<Pair> pair = meeting.Join();
      status = pair.status();
      if (pair.ok()) {
        Generation generation(options, tally, random, **client, *std::move(pair));
        status = generation.Train();
        if (generation.agreed()) deadline = std::chrono::steady_clock::now() + kAgreementPatience;
      }
    } else {
      status = client.status();
    }
    if (status.ok()) return 0;
    if (!Passes(status)) {
      std::fprintf(stderr, "rank %u: %s\n", options.rank, status.ToString().c_str());
      return 1;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  std::fprintf(stderr, "rank %u: no agreement for a minute\n", options.rank);
  return 1;
}

Shard ReadShard(const std::string& endpoint, uint32_t rank) {
  while (true) {
    const auto client = Client::Connect(endpoint);
    if (!client.ok()) continue;
    v1::AttachOptimizerRequest request;
    request.set_name(NameOf(rank));
    request.set_sync(v1::SYNC_PULL);
    const auto attachment = (*client)->Attach(request);
    if (!attachment.ok()) continue;
    Shard shard{(*attachment)->optimizer().committed_steps(), {}};
    for (size_t parameter = 0; parameter < 2; ++parameter) {
      const auto weights = (*attachment)->Parameter<float>(parameter);
      shard.weights.insert(shard.weights.end(), weights.begin(), weights.end());
    }
    return shard;
  }
}

}  // namespace superoffload::fault
