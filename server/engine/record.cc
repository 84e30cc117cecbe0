#include "server/engine/record.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "server/engine/spec.h"
#include "server/memory/crc32.h"

namespace superoffload::engine {

struct Record::Header {
  uint64_t magic;
  uint32_t version;
  uint32_t groups;
  uint32_t scalars;
  uint32_t arrays;
  uint64_t parameters;
  uint64_t stretches;
  char algorithm[24];  // NUL-ended
  uint32_t crc32;      // of what is above
  uint32_t incomplete;
  uint64_t committed;
  uint64_t trainer_start_time;
  uint64_t run;
  uint32_t trainer_pid;
  uint32_t kept_steps;  // 0 before version 5, which keeps 2
  // Terms of each step, before version 5.
  double gradient_scale[2];
  double total_sum_of_squares[2];
  double max_grad_norm[2];
  uint64_t lineage;           // made anew by each restore
  uint64_t attempt;           // the last one that was begun; never used again
  uint64_t prepared;          // the step whose gradients have all landed here; committed + 1 or 0
  uint64_t prepared_attempt;  // its attempt
  uint64_t directions;        // step << 32 | bucket + 1; 0: none are kept
  double unscale[2];
  uint64_t seed;
  uint8_t reserved[40];
};

namespace {

constexpr uint64_t kMagic = 0x3144524346464f53;  // "SOFFCRD1"
constexpr size_t kHeaderBytes = 512;
constexpr size_t kOldHeaderBytes = 256;  // before version 5

size_t RoundUp(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Of an undo slot of any format.
size_t SlotBytes(const Layout& layout) {
  size_t bytes = 0;
  for (const StateFormat& format : layout.formats) bytes = std::max(bytes, kernels::UndoSlotBytes(*format.algorithm));
  return bytes;
}

// Where the parts of a record begin.
struct Offsets {
  explicit Offsets(const Layout& layout)
      : terms(layout.version < 5 ? kOldHeaderBytes : kHeaderBytes),
        scalars(terms + (layout.version < 5 ? 0 : RoundUp(4 * layout.kept_steps * sizeof(double)))),
        steps(scalars + RoundUp(layout.kept_steps * layout.groups * layout.algorithm->scalars.size() * sizeof(double))),
        absorbed(steps + RoundUp(layout.kept_steps * layout.placements.size() * sizeof(uint64_t))),
        logged(absorbed + RoundUp(layout.stretches * sizeof(uint64_t))),
        unpublished(logged + (layout.has_logs ? RoundUp(layout.kept_steps * layout.buckets.size()) : 0)),
        slots(unpublished + (layout.has_logs ? RoundUp(layout.buckets.size()) : 0)),
        end(slots + kMaxWorkers * SlotBytes(layout)) {}
  size_t terms, scalars, steps, absorbed, logged, unpublished, slots, end;
};

std::string AlgorithmIn(const char (&text)[24]) { return {text, ::strnlen(text, sizeof(text))}; }

template <typename T>
T* At(std::byte* memory, size_t offset) {
  return reinterpret_cast<T*>(memory + offset);
}

}  // namespace

Record::OfStep Record::Terms(std::byte* memory, const Layout& layout, size_t which, double (Header::*before)[2]) {
  if (layout.version < 5) return {At<Header>(memory, 0)->*before, layout.kept_steps};
  return {At<double>(memory, Offsets(layout).terms) + which * layout.kept_steps, layout.kept_steps};
}

size_t Record::Bytes(const Layout& layout) { return Offsets(layout).end; }

size_t Record::UndoBytes(const Layout& layout) { return Offsets(layout).end - Offsets(layout).slots; }

Record::Record(std::byte* memory, const Layout& layout, Deaths* deaths)
    : deaths_(deaths),
      header_(At<Header>(memory, 0)),
      layout_version_(layout.version),
      algorithm_(layout.algorithm),
      groups_(layout.groups),
      parameters_(layout.placements.size()),
      stretches_(layout.stretches),
      buckets_(layout.buckets),
      kept_(layout.kept_steps),
      gradient_scale_(Terms(memory, layout, 0, &Header::gradient_scale)),
      unscale_(Terms(memory, layout, 1, &Header::unscale)),
      total_sum_of_squares_(Terms(memory, layout, 2, &Header::total_sum_of_squares)),
      max_grad_norm_(Terms(memory, layout, 3, &Header::max_grad_norm)),
      scalars_(At<double>(memory, Offsets(layout).scalars)),
      steps_(At<uint64_t>(memory, Offsets(layout).steps)),
      absorbed_(At<uint64_t>(memory, Offsets(layout).absorbed)),
      logged_(layout.has_logs ? At<uint8_t>(memory, Offsets(layout).logged) : nullptr),
      unpublished_(layout.has_logs ? At<uint8_t>(memory, Offsets(layout).unpublished) : nullptr),
      slots_(memory + Offsets(layout).slots),
      slot_bytes_(SlotBytes(layout)) {
  static_assert(sizeof(Header) == kOldHeaderBytes);
  SUPEROFFLOAD_CHECK(algorithm_->name.size() < sizeof(Header::algorithm), algorithm_->name);
  if (header_->magic != 0) return;
  header_->version = layout.version;
  header_->groups = static_cast<uint32_t>(groups_);
  header_->scalars = static_cast<uint32_t>(algorithm_->scalars.size());
  header_->arrays = static_cast<uint32_t>(algorithm_->arrays.size());
  header_->parameters = parameters_;
  header_->stretches = stretches_;
  if (layout.version >= 5) header_->kept_steps = static_cast<uint32_t>(kept_);
  std::memcpy(header_->algorithm, algorithm_->name.data(), algorithm_->name.size());
  Order();
  header_->magic = kMagic;
  header_->crc32 = memory::Crc32(header_, offsetof(Header, crc32));
}

absl::Status Record::Check() const {
  if (!KnowsVersion()) {
    return absl::FailedPreconditionError(absl::StrCat("the optimizer's record is of format version ", header_->version,
                                                      ", this daemon reads versions ", kOldestVersion, " to ", kVersion,
                                                      "; recover it with a daemon of that version"));
  }
  if (!HeaderWhole()) return absl::DataLossError("the header of the optimizer's record is damaged");
  if (header_->version != layout_version_) {
    return absl::DataLossError(absl::StrCat("the optimizer's record is of format version ", header_->version,
                                            " but its description of version ", layout_version_));
  }
  if (version() >= 5 && header_->kept_steps != kept_) {
    return absl::FailedPreconditionError(absl::StrCat("the optimizer's record keeps ", header_->kept_steps,
                                                      " steps but its plan ", kept_,
                                                      "; it does not belong to this plan"));
  }
  if (header_->groups != groups_ || header_->scalars != algorithm_->scalars.size() ||
      header_->arrays != algorithm_->arrays.size() || header_->parameters != parameters_ ||
      header_->stretches != stretches_ || AlgorithmIn(header_->algorithm) != algorithm_->name) {
    return absl::FailedPreconditionError(
        absl::StrCat("the optimizer's record is of ", AlgorithmIn(header_->algorithm), " with ", header_->groups,
                     " groups, ", header_->parameters, " parameters and ", header_->stretches,
                     " chunks but its plan is of ", std::string(algorithm_->name), " with ", groups_, ", ", parameters_,
                     " and ", stretches_, "; it does not belong to this plan"));
  }
  const auto counted = [this](uint32_t parameter) { return ParameterSteps(committed(), parameter) <= committed(); };
  bool whole = GradientsAreThere();
  for (uint32_t i = 0; whole && i < parameters_; ++i) whole = counted(i);
  const uint64_t prepared = header_->prepared;
  if (prepared > header_->committed + 1 || header_->prepared_attempt > header_->attempt) whole = false;
  // The attempts of an optimizer are steps that were begun: it never comes near to the end of what they are counted in.
  if (header_->committed > kMaxSteps || header_->attempt > std::numeric_limits<uint64_t>::max() / 2) whole = false;
  // The steps that recovery, or whoever commits what is prepared, is going to make.
  const uint64_t absorbed = stretches_ == 0 ? header_->committed : *std::min_element(absorbed_, absorbed_ + stretches_);
  for (uint64_t t = absorbed + 1; whole && t <= header_->committed; ++t) {
    whole = ValuesInRange(t) && std::isfinite(gradient_scale_[t]);
  }
  if (whole && complete() && this->prepared()) {
    const uint64_t t = prepared;
    whole = ValuesInRange(t) && std::isfinite(unscale_[t]) && unscale_[t] != 0 && max_grad_norm_[t] >= 0;
  }
  if (complete() && !whole) {
    return absl::DataLossError("the optimizer's record of what its state holds is damaged");
  }
  return absl::OkStatus();
}

// Of the steps that the state lacks: those that slots or logs hold.
bool Record::GradientsAreThere() const {
  const uint64_t t = header_->committed;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    const BucketLayout& bucket = buckets_[i];
    // The gradient of a prepared step has taken the place of the one before it.
    const uint64_t most = bucket.one_slot() ? (prepared() ? 0 : 1) : bucket.log_slots == 0 ? kGradientSlots : kept_;
    const auto there = [t, most](uint64_t absorbed) { return absorbed <= t && t - absorbed <= most; };
    const uint64_t* const first = absorbed_ + bucket.first_stretch;
    if (!std::all_of(first, first + bucket.stretches(), there)) return false;
    for (uint64_t step = 0; bucket.log_slots == 0 && step < kept_; ++step) {
      if (Logged(step, i)) return false;
    }
  }
  return true;
}

bool Record::ValuesInRange(uint64_t t) const {
  const std::vector<double> scalars = Values(t).scalars;
  for (size_t i = 0; i < scalars.size(); ++i) {
    if (!ValidateScalar(algorithm_->scalars[i % algorithm_->scalars.size()], scalars[i]).ok()) return false;
  }
  return true;
}

uint32_t Record::version() const { return header_->version; }

bool Record::KnowsVersion() const {
  return header_->magic == kMagic && header_->version >= kOldestVersion && header_->version <= kVersion;
}

bool Record::HeaderWhole() const {
  return KnowsVersion() && header_->crc32 == memory::Crc32(header_, offsetof(Header, crc32));
}

uint64_t Record::committed() const { return header_->committed; }

Record::Trainer Record::trainer() const { return {header_->trainer_pid, header_->trainer_start_time}; }

void Record::SetTrainer(const Trainer& trainer) {
  header_->trainer_pid = 0;
  Order();
  header_->trainer_start_time = trainer.start_time;
  Order();
  header_->trainer_pid = trainer.pid;
}

// A schedule reads it before its snapshot, when a restore may write it.
uint64_t Record::run() const { return std::atomic_ref(header_->run).load(std::memory_order_relaxed); }

void Record::SetRun(uint64_t run) { std::atomic_ref(header_->run).store(run, std::memory_order_relaxed); }

Incompleteness Record::incompleteness() const { return static_cast<Incompleteness>(header_->incomplete); }

void Record::MarkNeverFilled() { header_->incomplete = static_cast<uint32_t>(Incompleteness::kNeverFilled); }

void Record::BeginPush() {
  header_->incomplete = static_cast<uint32_t>(Incompleteness::kPushing);
  Order();
}

void Record::EndPush() {
  Order();
  header_->incomplete = 0;
}

void Record::BeginRestore() {
  header_->incomplete = static_cast<uint32_t>(Incompleteness::kRestoring);
  Order();
}

void Record::EndRestore(uint64_t committed, std::span<const uint64_t> parameter_steps) {
  SUPEROFFLOAD_CHECK(parameter_steps.size() == parameters_, parameter_steps.size(), parameters_);
  header_->directions = 0;
  header_->committed = committed;
  std::fill_n(absorbed_, stretches_, committed);
  for (uint64_t t = 0; t < kept_; ++t) {
    for (size_t i = 0; i < parameters_; ++i) steps(t)[i] = parameter_steps[i] << 1;
  }
  Order();
  header_->incomplete = 0;
}

void Record::Commit(const StepValues& values, const Places& places) {
  SUPEROFFLOAD_CHECK(complete() && !prepared(),
                     "a step is committed on masters that are not whole, or beside a prepared one");
  const uint64_t t = header_->committed + 1;
  WriteStep(t, values, places);
  header_->committed = t;
  Order();
}

// What belongs to step `t`; it replaces what belongs to the oldest that is kept.
void Record::WriteStep(uint64_t t, const StepValues& values, const Places& places) {
  SUPEROFFLOAD_CHECK(values.scalars.size() == groups_ * algorithm_->scalars.size(), values.scalars.size());
  gradient_scale_[t] = values.gradient_scale;
  std::copy(values.scalars.begin(), values.scalars.end(), scalars_ + (t % kept_) * values.scalars.size());
  const uint64_t* const before = steps(t - 1);
  uint64_t* const after = steps(t);
  for (size_t i = 0; i < parameters_; ++i) {
    const uint64_t counted = before[i] & ~uint64_t{1};
    after[i] = !places.absent.empty() && places.absent[i] ? counted : counted + 3;
  }
  for (size_t i = 0; logged_ != nullptr && i < buckets_.size(); ++i) {
    const bool logged = !places.logged.empty() && places.logged[i];
    logged_[t % kept_ * buckets_.size() + i] = logged ? 1 : 0;
    if (logged) unpublished_[i] = 1;
  }
  Order();
}

std::optional<Record::Prepared> Record::prepared() const {
  const uint64_t t = header_->committed + 1;
  if (header_->prepared != t) return std::nullopt;
  return Prepared{t, header_->prepared_attempt, {0, unscale_[t], max_grad_norm_[t]}};
}

void Record::Prepare(const StepValues& values, const Places& places, double max_grad_norm) {
  SUPEROFFLOAD_CHECK(complete() && !prepared(), "step ", header_->committed + 1, " is prepared twice");
  const uint64_t t = header_->committed + 1;
  unscale_[t] = values.gradient_scale;
  max_grad_norm_[t] = max_grad_norm;
  WriteStep(t, values, places);
  header_->prepared_attempt = header_->attempt;
  Order();
  header_->prepared = t;
  Order();
}

void Record::CommitPrepared(double sum_of_squares, double clip_coefficient) {
  SUPEROFFLOAD_CHECK(prepared(), "step ", header_->committed + 1, " is committed but not prepared");
  const uint64_t t = header_->committed + 1;
  total_sum_of_squares_[t] = sum_of_squares;
  gradient_scale_[t] = unscale_[t] * clip_coefficient;
  Order();
  header_->committed = t;
  Order();
  header_->prepared = 0;
  Order();
}

void Record::DropPrepared() {
  header_->prepared = 0;
  Order();
}

Record::RunTerms Record::last_terms() const {
  const uint64_t t = header_->committed;
  return {total_sum_of_squares_[t], unscale_[t], max_grad_norm_[t]};
}

uint64_t Record::attempt() const { return header_->attempt; }

void Record::BeginAttempt() {
  ++header_->attempt;
  Order();
}

uint64_t Record::seed() const { return std::atomic_ref(header_->seed).load(std::memory_order_relaxed); }

void Record::SetSeed(uint64_t seed) { std::atomic_ref(header_->seed).store(seed, std::memory_order_relaxed); }

uint64_t Record::lineage() const { return header_->lineage; }

void Record::SetLineage(uint64_t lineage) { header_->lineage = lineage; }

StepValues Record::Values(uint64_t t) const {
  const size_t count = groups_ * algorithm_->scalars.size();
  const double* const scalars = scalars_ + (t % kept_) * count;
  return {gradient_scale_[t], std::vector<double>(scalars, scalars + count)};
}

void Record::MarkPublished(size_t bucket) {
  if (unpublished_ == nullptr) return;
  Order();
  unpublished_[bucket] = 0;
}

kernels::UndoSlot* Record::BeginAbsorb(size_t worker, size_t stretch, uint64_t t) {
  SUPEROFFLOAD_CHECK(worker < kMaxWorkers && stretch < stretches_, worker, stretch);
  kernels::BeginUndo(slot(worker), t << 32 | (stretch + 1));
  return &slot(worker);
}

void Record::EndAbsorb(size_t worker, size_t stretch, uint64_t t) {
  SUPEROFFLOAD_CHECK_EQ(absorbed_[stretch] + 1, t, "steps are absorbed in order; stretch ", stretch);
  Order();
  absorbed_[stretch] = t;
  Order();
  kernels::EndUndo(slot(worker));
}

bool Record::HasDirections(size_t bucket, uint64_t t) const { return header_->directions == (t << 32 | (bucket + 1)); }

std::optional<size_t> Record::directions() const {
  if (header_->directions == 0) return std::nullopt;
  return (header_->directions & 0xffffffff) - 1;
}

void Record::KeepDirections(size_t bucket, uint64_t t) {
  Order();
  header_->directions = t << 32 | (bucket + 1);
  Order();
}

void Record::DropDirections() {
  Order();
  header_->directions = 0;
  Order();
}

}  // namespace superoffload::engine
