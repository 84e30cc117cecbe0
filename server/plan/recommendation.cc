#include "server/plan/recommendation.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/plan/narrower_state.h"
#include "server/simulator/model_layout.h"

namespace superoffload::plan {
namespace {

using simulator::MemoryItem;
using simulator::TotalBytes;

std::string GiB(double bytes) { return absl::StrFormat("%.1f GiB", bytes / (1 << 30)); }

uint64_t BytesOf(const std::vector<MemoryItem>& items, std::string_view purpose) {
  for (const MemoryItem& item : items) {
    if (item.purpose == purpose) return item.bytes;
  }
  return 0;
}

// Ranks that may be recommended: as many as there are of the machine to be connected.
uint32_t MostRanks(const simulator::Machine& machine) {
  constexpr uint32_t kMost = 64;
  return simulator::ValidateNetwork(machine).ok() ? std::min(kMost, machine.network.most_ranks) : 1;
}

// Whether the share of rank 0 fits, with less room if need be. No rank has more: of each parameter it has rows / ranks,
// rounded up.
absl::StatusOr<bool> ShareFits(Question question, bool gpu) {
  if (const std::vector<Question> less = WithLessRoom(question); !less.empty()) question = less.back();
  const engine::OptimizerSpec share = simulator::ShardOf(question.spec, 0, question.ranks);
  const absl::StatusOr<engine::Layout> layout = engine::PlanLayout(share);
  if (!layout.ok()) return layout.status();
  if (TotalBytes(HostMemory(question, share, *layout)) > HostBudgetBytes(question.machine)) return false;
  return !gpu || TotalBytes(GpuMemoryOf(question, *layout)) <= question.gpu_bytes();
}

// The fewest from 2 on, on which the host's memory suffices, and the GPU's if `gpu`; 0: no number does. Of more ranks
// each has less.
absl::StatusOr<uint32_t> RanksThatFit(Question question, bool gpu) {
  uint32_t too_few = 1, enough = MostRanks(question.machine);
  if (enough == too_few) return 0;
  question.ranks = enough;
  const absl::StatusOr<bool> most_fit = ShareFits(question, gpu);
  if (!most_fit.ok()) return most_fit.status();
  if (!*most_fit) return 0;
  while (enough - too_few > 1) {
    question.ranks = too_few + (enough - too_few) / 2;
    const absl::StatusOr<bool> fits = ShareFits(question, gpu);
    if (!fits.ok()) return fits.status();
    (*fits ? enough : too_few) = question.ranks;
  }
  return enough;
}

// The share of the time that a streamed forward pass computes: T*b / (T*b + peak). Of a parameter of two bytes a token
// takes two operations, so the twos cancel; of the parameters a token takes the active ones.
double StreamingEfficiency(const Question& question) {
  const double bytes = static_cast<double>(kernels::DTypeBytes(question.model.parameters.front().dtype));
  const double bandwidth = question.ranks * question.machine.h2d.points.back().bytes_per_second * 2 / bytes;
  const double flops = question.machine.gpu.peak_flops * question.machine.gpu.matmul_efficiency;
  const double active = static_cast<double>(simulator::ActiveParameterCount(question.model)) /
                        static_cast<double>(simulator::ParameterCount(question.model));
  const double moved = question.pass.tokens() * active * bandwidth;
  return moved / (moved + flops);
}

class Recommender {
 public:
  Recommender(Question question, MemoryPlan memory) : q_(std::move(question)), memory_(std::move(memory)) {}

  absl::StatusOr<v1::Recommendation> Make() && {
    out_.set_weights(v1::Recommendation::WEIGHTS_RESIDENT);
    out_.set_ranks(q_.ranks);
    out_.set_bucket_bytes(q_.spec.bucket_bytes == 0 ? engine::kDefaultBucketBytes : q_.spec.bucket_bytes);
    out_.set_checkpointing(ToProto(q_.pass.checkpointing));
    out_.set_loss(q_.pass.loss == simulator::Loss::kChunked ? v1::LOSS_CHUNKED : v1::LOSS_WHOLE);
    if (absl::Status status = CheckHost(); !status.ok()) return status;
    if (hopeless_) return std::move(out_);
    if (absl::Status status = memory_.gpu_fits ? CheckWatching() : CheckGpu(); !status.ok()) return status;
    if (out_.sentences().empty()) {
      Say(absl::StrCat("Everything fits as requested: the weights ",
                       q_.gpu.streamed_weights == 0 ? "stay in HBM" : "stream as far as they were asked to",
                       ", and the optimizer's state stays in the host's memory."));
    }
    return std::move(out_);
  }

 private:
  static v1::ActivationCheckpointing ToProto(simulator::Checkpointing checkpointing) {
    switch (checkpointing) {
      case simulator::Checkpointing::kNone:
        return v1::ACTIVATION_CHECKPOINTING_NONE;
      case simulator::Checkpointing::kSelective:
        return v1::ACTIVATION_CHECKPOINTING_SELECTIVE;
      case simulator::Checkpointing::kFull:
        return v1::ACTIVATION_CHECKPOINTING_FULL;
    }
    return v1::ACTIVATION_CHECKPOINTING_UNSPECIFIED;
  }

  void Say(std::string sentence) { out_.add_sentences(std::move(sentence)); }

  absl::Status CheckHost() {
    if (memory_.host_fits) return absl::OkStatus();
    const absl::StatusOr<uint32_t> ranks = RanksThatFit(q_, /*gpu=*/false);
    if (!ranks.ok()) return ranks.status();
    const double needed = static_cast<double>(TotalBytes(memory_.ranks.front().host));
    const std::string over =
        absl::StrCat("The optimizer takes ", GiB(needed), " of host memory on a rank; the daemon's budget is ",
                     GiB(static_cast<double>(HostBudgetBytes(q_.machine))), " (80 %).");
    std::optional<uint32_t> more_ranks;
    if (needed <= q_.machine.host.memory_bytes * 0.95) {
      Say(absl::StrCat(over, " Set memory_budget_bytes in superoffloadd.textproto to at least ",
                       static_cast<uint64_t>(needed), "."));
    } else if (*ranks == 0) {
      hopeless_ = true;
      const uint32_t most = MostRanks(q_.machine);
      Say(absl::StrCat(over, most == 1 ? absl::StrCat(" ", q_.machine.name, " comes alone; take another machine.")
                                       : absl::StrCat(" No number of ranks up to ", most, " holds it.")));
    } else {
      more_ranks = *ranks;
      Say(absl::StrCat(over, " ", *ranks, " ranks hold it: pass --ranks=", *ranks, "."));
    }
    if (const std::optional<std::string> narrower = NarrowerStateThatFits(q_)) Say(*narrower);
    return more_ranks ? GoOnWith(*more_ranks) : absl::OkStatus();
  }

  absl::Status GoOnWith(uint32_t ranks) {
    q_.ranks = ranks;
    out_.set_ranks(ranks);
    absl::StatusOr<MemoryPlan> memory = PlanMemory(q_);
    if (memory.ok()) memory_ = *std::move(memory);
    return memory.status();
  }

  // It fits once gradients leave during backward; before that they all stay, unless each pass's leave.
  absl::Status CheckWatching() {
    if (q_.gpu.sums_on_host) return absl::OkStatus();
    const std::vector<MemoryItem>& items = memory_.ranks.front().gpu;
    const uint64_t all = simulator::AllGradientBytes(q_.model) / q_.ranks, leaving = BytesOf(items, "gradients");
    const uint64_t watched = TotalBytes(items) - leaving + (q_.ranks == 1 ? std::max(all, leaving) : all + leaving);
    if (watched > q_.gpu_bytes()) {
      Say(absl::StrCat(
          "Pass overlap=True: with overlap=\"auto\" the first three steps keep all gradients in HBM, which takes ",
          GiB(static_cast<double>(watched)), " of ", GiB(static_cast<double>(q_.gpu_bytes())), "."));
    }
    return absl::OkStatus();
  }

  bool FitsWith(const simulator::Pass& pass, const simulator::GpuUse& gpu, const engine::Layout& layout) {
    Question changed = q_;
    changed.pass = pass;
    changed.gpu = gpu;
    return TotalBytes(GpuMemoryOf(changed, layout)) <= q_.gpu_bytes();
  }

  absl::Status CheckGpu() {
    const absl::StatusOr<engine::Layout> layout = engine::PlanLayout(simulator::ShardOf(q_.spec, 0, q_.ranks));
    if (!layout.ok()) return layout.status();
    Say(absl::StrCat(
        q_.ranks == 1 ? "HBM lacks " : "Each rank's HBM lacks ",
        GiB(static_cast<double>(TotalBytes(memory_.ranks.front().gpu)) - static_cast<double>(q_.gpu_bytes())),
        " for this."));
    simulator::Pass pass = q_.pass;
    simulator::GpuUse gpu = q_.gpu;
    if (ChunkLoss(pass, gpu, *layout) && FitsWith(pass, gpu, *layout)) return absl::OkStatus();
    if (gpu.resident_buckets > 0) {
      gpu.resident_buckets = 0;
      Say("Keep no buckets resident on the GPU.");
      if (FitsWith(pass, gpu, *layout)) return absl::OkStatus();
    }
    if (pass.checkpointing != simulator::Checkpointing::kFull) {
      pass.checkpointing = simulator::Checkpointing::kFull;
      out_.set_checkpointing(v1::ACTIVATION_CHECKPOINTING_FULL);
      Say("Checkpoint the activations of every block.");
      if (FitsWith(pass, gpu, *layout)) return absl::OkStatus();
    }
    const bool leave = LetActivationsLeave(pass, gpu, *layout);
    const uint64_t batch = pass.batch;
    simulator::GpuUse use = q_.gpu_use();
    use.resident_buckets = gpu.resident_buckets;
    pass.batch = std::max<uint64_t>(1, simulator::LargestBatch(q_.model, *layout, pass, use, q_.gpu_bytes()));
    if (FitsWith(pass, gpu, *layout)) {
      Say(absl::StrCat(leave ? "Or use" : "Use", " a batch of ", pass.batch, " instead of ", batch,
                       "; where passes are accumulated, all gradients stay in HBM",
                       q_.ranks == 1 ? ", or with accumulate=\"daemon\" (--sums_on_host) in the host's memory." : "."));
      return absl::OkStatus();
    }
    return leave ? absl::OkStatus() : ShareOrStream(pass, gpu, *layout);
  }

  // Whether that makes room, on the host as well. It comes before weights that stream: in either pass it uses the link
  // in the direction in which little else moves then, and no update waits for it.
  bool LetActivationsLeave(const simulator::Pass& pass, const simulator::GpuUse& gpu, const engine::Layout& layout) {
    Question changed = q_;
    changed.pass = pass;
    changed.gpu = gpu;
    const std::optional<uint32_t> leaving =
        simulator::FewestOffloaded(changed.model, layout, pass, changed.gpu_use(), changed.gpu_bytes());
    if (!leaving) return false;
    changed.pass.offloaded_activations = simulator::ShareOfBlocks(*leaving, Blocks());
    if (q_.machine.one_memory || !HostHolds(changed, layout)) return false;
    SayThatActivationsLeave(changed.pass);
    return true;
  }

  uint32_t Blocks() const { return static_cast<uint32_t>(q_.model.architecture.layers); }

  bool HostHolds(const Question& changed, const engine::Layout& layout) const {
    const engine::OptimizerSpec share = simulator::ShardOf(changed.spec, 0, changed.ranks);
    return TotalBytes(HostMemory(changed, share, layout)) <= HostBudgetBytes(changed.machine);
  }

  void SayThatActivationsLeave(const simulator::Pass& pass) {
    out_.set_offloaded_activations(pass.offloaded_activations);
    const simulator::Architecture& a = q_.model.architecture;
    Say(absl::StrFormat(
        "With a batch of %d, inputs of %d of %d checkpointed blocks wait in the host's memory for their backward pass: "
        "%s of it (--offloaded_activations=%g, and superoffload.torch.offload_activations(model, optimizer)).",
        pass.batch, simulator::OffloadedBlocks(a, pass), a.layers, GiB(simulator::ActivationsOf(a, pass).host),
        pass.offloaded_activations));
  }

  // Where that takes less. It comes first: it costs no memory elsewhere and next to no time.
  bool ChunkLoss(simulator::Pass& pass, const simulator::GpuUse& gpu, const engine::Layout& layout) {
    Question chunked = q_;
    chunked.gpu = gpu;
    chunked.pass.loss = simulator::Loss::kChunked;
    const uint64_t before = TotalBytes(memory_.ranks.front().gpu), after = TotalBytes(GpuMemoryOf(chunked, layout));
    if (after >= before) return false;
    pass.loss = simulator::Loss::kChunked;
    out_.set_loss(v1::LOSS_CHUNKED);
    Say(absl::StrCat("Compute the loss in chunks of tokens (--loss=chunked), which saves ",
                     GiB(static_cast<double>(before - after)), ": not all of the ",
                     GiB(simulator::ActivationsOf(q_.model.architecture, q_.pass).head),
                     " of logits are in HBM at once. Hugging Face models do so with liger-kernel installed and "
                     "use_liger_kernel=True in TrainingArguments, where Liger knows their family; a loop of your own "
                     "does so with liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss."));
    return true;
  }

  // With the requested batch if that makes room for it, else with the smallest. Ranks where a streamed pass would
  // mostly wait.
  absl::Status ShareOrStream(const simulator::Pass& smallest, const simulator::GpuUse& gpu,
                             const engine::Layout& layout) {
    bool shared = false, streamed = false;
    for (const uint64_t batch : {q_.pass.batch, smallest.batch}) {
      Question changed = q_;
      changed.pass = smallest;
      changed.pass.batch = batch;
      changed.gpu = gpu;
      if (!shared) {
        const absl::StatusOr<uint32_t> ranks = RanksThatFit(changed, /*gpu=*/true);
        if (!ranks.ok()) return ranks.status();
        shared = *ranks > q_.ranks;
        if (shared) Share(*ranks, batch);
      }
      if (!streamed) {
        streamed = LetActivationsLeave(changed.pass, gpu, layout) || Stream(changed, layout, shared);
      }
    }
    if (shared || streamed) return absl::OkStatus();
    Say(absl::StrCat(MostRanks(q_.machine) > 1 ? "Neither more ranks" : absl::StrCat(q_.machine.name, " comes alone"),
                     MostRanks(q_.machine) > 1 ? " nor" : ", and neither",
                     " weights that stream nor activations that leave make room: use a shorter sequence."));
    return absl::OkStatus();
  }

  void Share(uint32_t ranks, uint64_t batch) {
    if (out_.weights() != v1::Recommendation::WEIGHTS_STREAMED) out_.set_ranks(ranks);
    Say(absl::StrCat("With a batch of ", batch, " each, ", ranks,
                     " ranks hold it, which share the weights: pass --ranks=", ranks, "."));
  }

  // Whether that makes room.
  bool Stream(Question changed, const engine::Layout& layout, bool shared) {
    const auto fewest = [&] {
      return simulator::FewestStreamed(changed.model, layout, changed.pass, changed.gpu_use(), changed.gpu_bytes());
    };
    std::optional<uint32_t> streamed = fewest();
    if (!streamed && !q_.machine.one_memory) {
      changed.pass.offloaded_activations = 1;
      if (HostHolds(changed, layout)) streamed = fewest();
      if (streamed) SayThatActivationsLeave(changed.pass);
    }
    if (!streamed) return false;
    const uint32_t blocks = Blocks();
    const double share = simulator::ShareOfBlocks(*streamed, blocks), efficiency = StreamingEfficiency(changed);
    if (!shared || efficiency >= 0.5) {
      out_.set_ranks(q_.ranks);
      out_.set_weights(v1::Recommendation::WEIGHTS_STREAMED);
      out_.set_streamed_fraction(share);
    }
    Say(absl::StrFormat(
        "On %s stream: with a batch of %d, %d of %d blocks through %d slots in HBM (--streamed_weights=%g, "
        "and weights=%g for the optimizer). A streamed forward pass computes %.0f %% of its time: T*b/(T*b + peak) "
        "with T = %.0f tokens, b = %.0f GB/s and peak = %.0f TFLOPS, T times the share of parameters that a token "
        "uses.",
        q_.ranks == 1 ? "one rank weights" : absl::StrCat(q_.ranks, " ranks the weights' shards"), changed.pass.batch,
        *streamed, blocks, changed.gpu.stream_slots, share, share, 100 * efficiency, changed.pass.tokens(),
        q_.ranks * q_.machine.h2d.points.back().bytes_per_second / 1e9,
        q_.machine.gpu.peak_flops * q_.machine.gpu.matmul_efficiency / 1e12));
    return true;
  }

  Question q_;  // with as many ranks as are recommended
  MemoryPlan memory_;
  bool hopeless_ = false;  // no setting makes the optimizer fit on the host
  v1::Recommendation out_;
};

}  // namespace

absl::StatusOr<v1::Recommendation> Recommend(const Question& question, const MemoryPlan& memory) {
  return Recommender(question, memory).Make();
}

}  // namespace superoffload::plan
