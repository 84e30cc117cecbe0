// What outlives the daemon besides state and gradients: how far every chunk's state has come, what the last two
// committed steps were, and the workers' undo slots. With it a daemon that was killed at any instruction can bring an
// optimizer to its last committed step.
//
// In memory that survives the process (fixed little-endian layout, no pointers):
//
//   Header | double terms[4][K] | double scalars[K][groups][scalars] | uint64_t steps[K][parameters]
//          | uint64_t absorbed[stretches] | undo slots[kMaxWorkers]
//
// and where buckets have logs, before the undo slots, uint8_t logged[K][buckets] | uint8_t unpublished[buckets],
//
// each from a multiple of 64 bytes on. K is Layout::kept_steps. `committed` is the number t of the last committed step;
// what belongs to step t lies at index t mod K. Its gradient lies in slot (t-1) mod 2, that of the step before in the
// other; or, where `logged` says so, in the bucket's log. A stretch whose `absorbed` is k holds the state after step k:
// t-2, t-1 or t, with a log down to t-K. So whatever is left to do for a stretch is to absorb the gradients of steps
// k+1 to t, of which the hyper-parameters, the gradient scale, and each parameter's own step count are here. Parameters
// of a bucket that is `unpublished` are those of an earlier step.
//
// steps[t mod K][p] is 2 * n + (1 if parameter p had a gradient in step t), where n counts the steps up to t in which
// it had one: a parameter without a gradient is left alone, and its bias correction goes on where it stopped.
//
// The header's fixed fields carry a CRC-32. `incomplete` says why the masters are not whole, if they are not
// (Incompleteness).
//
// A stretch is updated under an undo slot (kernels/undo_slot.h) that names it and the step; `absorbed` is set when
// the stretch is done, and only then the slot is released. A step is committed by one store of `committed`, after all
// else of it was written. A step of a run of several ranks is prepared first, by one store of `prepared` after all else
// but its verdict; it then counts as prepared while `prepared` is committed + 1. Program order of each thread is all
// that a killed process needs.
//
// The header of version 5 has room for fields to come: what is zero in it has no meaning yet. Versions 3 and 4 have the
// terms in their header, for K = 2, and lay the optimizer out in other ways (layout.h): a record keeps its version, and
// its optimizer that layout, as long as it lives. A daemon hosts records of the versions that it reads only: it keeps
// the memory of any other, lists it as damaged with that reason, and leaves it to a daemon of that version.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_RECORD_H_
#define SUPEROFFLOAD_SERVER_ENGINE_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/algorithm.h"
#include "kernels/undo_slot.h"
#include "server/engine/layout.h"
#include "server/engine/platform.h"

namespace superoffload::engine {

// Also the most threads that a WorkerPool may have.
inline constexpr size_t kMaxWorkers = 1024;

// Why an optimizer cannot train yet: masters or moments are none that a step, a push or a restore has left. Stored.
enum class Incompleteness : uint32_t {
  kNone = 0,
  kRestoring = 1,    // a restore failed or was cut off; another restore completes it
  kNeverFilled = 2,  // created; the first push or restore completes it
  kPushing = 3,      // a push was cut off; it is finished from the parameter memory, which still has all of it
};

// What a step does with a gradient, but for who has one.
struct StepValues {
  double gradient_scale = 1;    // unscale factor times clip coefficient
  std::vector<double> scalars;  // of group 0, then of group 1, ...

  bool operator==(const StepValues&) const = default;
};

// The view of a record; does not own it.
class Record {
 public:
  // Formats of the record, and of the description beside it, that this daemon reads; new optimizers get the last.
  static constexpr uint32_t kOldestVersion = kOldestLayoutVersion;
  static constexpr uint32_t kVersion = kLayoutVersion;

  static size_t Bytes(const Layout& layout);
  static size_t UndoBytes(const Layout& layout);  // of these, what the undo slots take; they come last

  // `memory` is zero, for a new optimizer, or a record of the same plan; aligned to 64 bytes.
  // `layout` must outlive it.
  Record(std::byte* memory, const Layout& layout, Deaths* deaths = &RealDeaths());

  // Whether `memory` is a record of the plan. DATA_LOSS: it is damaged. FAILED_PRECONDITION says what differs.
  absl::Status Check() const;

  uint32_t version() const;
  bool KnowsVersion() const;  // whether it is a record of a format that this daemon reads

  // Whether the fixed fields are as they were written: magic, version, numbers and their CRC-32.
  bool HeaderWhole() const;

  uint64_t committed() const;

  // The process whose trainer is attached, as optimizer/process.h has it; zeros for none.
  struct Trainer {
    uint32_t pid = 0;
    uint64_t start_time = 0;
  };
  Trainer trainer() const;
  void SetTrainer(const Trainer& trainer);

  // Names the training run that checkpoints are of.
  uint64_t run() const;
  void SetRun(uint64_t run);

  // Under which state is rounded, by algorithms that do so stochastically.
  uint64_t seed() const;
  void SetSeed(uint64_t seed);

  Incompleteness incompleteness() const;
  bool complete() const { return incompleteness() == Incompleteness::kNone; }
  void MarkNeverFilled();
  void BeginPush();
  void EndPush();
  void BeginRestore();
  void EndRestore(uint64_t committed, std::span<const uint64_t> parameter_steps);

  // Which parameters have no gradient in a step, and which buckets have theirs in the log; by index, empty: none.
  struct Places {
    std::vector<bool> absent{};
    std::vector<bool> logged{};
  };

  // Step committed() + 1 is committed with these values.
  void Commit(const StepValues& values, const Places& places);

  // Of runs of several ranks; README.md has the protocol. What a step is decided with:
  struct RunTerms {
    double sum_of_squares = 0;  // of all ranks; of a step that is prepared only, 0
    double gradient_scale = 1;  // as END_STEP has it: without the clip coefficient
    double max_grad_norm = 0;

    bool operator==(const RunTerms&) const = default;
  };

  // A step whose gradients have all landed here: committed() + 1. It outlives trainers and daemons.
  struct Prepared {
    uint64_t step = 0;
    uint64_t attempt = 0;
    RunTerms terms;
  };
  std::optional<Prepared> prepared() const;

  // As Commit, but for the verdict. The stretches hold committed() - 1 at least, as when a step is committed.
  void Prepare(const StepValues& values, const Places& places, double max_grad_norm);
  void CommitPrepared(double sum_of_squares, double clip_coefficient);
  void DropPrepared();

  RunTerms last_terms() const;  // of the last committed step, if it was one of a run

  // The id of the attempt at a step that was begun last; none is ever used again.
  uint64_t attempt() const;
  void BeginAttempt();

  // Ranks go on together only if theirs are equal.
  uint64_t lineage() const;
  void SetLineage(uint64_t lineage);

  // Of step `t`, one of the last Layout::kept_steps that were committed.
  StepValues Values(uint64_t t) const;
  bool Had(uint64_t t, uint32_t parameter) const { return (steps(t)[parameter] & 1) != 0; }
  uint64_t ParameterSteps(uint64_t t, uint32_t parameter) const { return steps(t)[parameter] >> 1; }

  bool Logged(uint64_t t, size_t bucket) const {
    return logged_ != nullptr && logged_[t % kept_ * buckets_.size() + bucket] != 0;
  }

  // Whether the parameters of a bucket are older than the last committed step.
  bool unpublished(size_t bucket) const { return unpublished_ != nullptr && unpublished_[bucket] != 0; }
  void MarkPublished(size_t bucket);

  uint64_t absorbed(size_t stretch) const { return absorbed_[stretch]; }

  // Around an update of `stretch` that absorbs the gradient of step `t`, by `worker`; the kernel gets the slot.
  kernels::UndoSlot* BeginAbsorb(size_t worker, size_t stretch, uint64_t t);
  void EndAbsorb(size_t worker, size_t stretch, uint64_t t);

  // Of algorithms with stages: the directions in the state memory are those with which the bucket absorbs step `t`,
  // until all of it has.
  bool HasDirections(size_t bucket, uint64_t t) const;
  std::optional<size_t> directions() const;  // whose they are
  void KeepDirections(size_t bucket, uint64_t t);
  void DropDirections();

  // A stretch whose update was cut off, and by which step.
  struct Torn {
    size_t worker;
    size_t stretch;
    uint64_t step;
  };

  // Calls `repair` for each.
  template <typename Repair>
  void ForEachTorn(Repair repair) {
    for (size_t worker = 0; worker < kMaxWorkers; ++worker) {
      const uint64_t claim = slot(worker).claim;
      if (claim == 0) continue;
      const Torn torn{worker, (claim & 0xffffffff) - 1, claim >> 32};
      if (torn.stretch < stretches_ && torn.step <= committed() && absorbed_[torn.stretch] + 1 == torn.step) {
        repair(torn);
      }
      kernels::EndUndo(slot(worker));
    }
  }
  kernels::UndoSlot& slot(size_t worker) {
    return *reinterpret_cast<kernels::UndoSlot*>(slots_ + worker * slot_bytes_);
  }

 private:
  struct Header;
  // What was stored is in memory before what is stored next, for whoever finds it after this process.
  void Order() const {
    kernels::KeepOrder();
    deaths_->MayCome();
  }
  bool GradientsAreThere() const;
  bool ValuesInRange(uint64_t t) const;  // the hyper-parameters that Values(t) has
  void WriteStep(uint64_t t, const StepValues& values, const Places& places);
  uint64_t* steps(uint64_t t) const { return steps_ + (t % kept_) * parameters_; }

  // One number of each step that is kept.
  class OfStep {
   public:
    OfStep(double* numbers, uint64_t kept) : numbers_(numbers), kept_(kept) {}
    double& operator[](uint64_t t) const { return numbers_[t % kept_]; }

   private:
    double* numbers_;
    uint64_t kept_;
  };
  // Those that are number `which` of the terms; in versions before 5, a field of the header.
  static OfStep Terms(std::byte* memory, const Layout& layout, size_t which, double (Header::*before)[2]);

  Deaths* const deaths_;
  Header* const header_;
  const uint32_t layout_version_;
  const kernels::Algorithm* const algorithm_;
  const size_t groups_;
  const size_t parameters_;
  const size_t stretches_;
  const std::vector<BucketLayout>& buckets_;
  const uint64_t kept_;
  const OfStep gradient_scale_;  // with the clip coefficient
  const OfStep unscale_;         // without it
  // Of runs of several ranks; zero in an optimizer that trains alone.
  const OfStep total_sum_of_squares_;  // over all ranks, of committed steps
  const OfStep max_grad_norm_;
  double* const scalars_;
  uint64_t* const steps_;
  uint64_t* const absorbed_;
  uint8_t* const logged_;  // null where no bucket has a log; so is what follows
  uint8_t* const unpublished_;
  std::byte* const slots_;
  const size_t slot_bytes_;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_RECORD_H_
