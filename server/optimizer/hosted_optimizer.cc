#include "server/optimizer/hosted_optimizer.h"

#include <sys/random.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "server/memory/crc32.h"

namespace superoffload::optimizer {
namespace {

// What a trainer whose process is not known has to come back in after the daemon's restart.
constexpr std::chrono::minutes kReturnTime{10};

// What a killed trainer's GPU has to end its copies in.
constexpr std::chrono::seconds kEndLimit{30};

// In a record: of a process that this PID name space does not see.
constexpr uint32_t kUnknownPid = 0xffffffff;

// Not 0.
uint64_t Draw() {
  uint64_t number = 0;
  while (number == 0) {
    if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) number = 0;
  }
  return number;
}

// Ring entries that set every scalar of every group.
size_t GroupEntries(const engine::OptimizerSpec& spec) {
  const size_t scalars = spec.algorithm->scalars.size();
  return spec.groups.size() * ((scalars + SUPEROFFLOAD_GROUP_SCALARS - 1) / SUPEROFFLOAD_GROUP_SCALARS);
}

}  // namespace

std::string NewUniqueId() { return absl::StrCat(absl::Hex(Draw(), absl::kZeroPad16)); }

absl::StatusOr<std::unique_ptr<HostedOptimizer>> HostedOptimizer::Create(
    OptimizerId id, std::string unique_id, engine::OptimizerSpec spec, engine::SpeculationPolicy policy,
    const std::string& description, const memory::Binding& binding, memory::MemoryBudget* budget,
    engine::WorkerPool* pool, OptimizerObserver* observer) {
  absl::StatusOr<std::unique_ptr<HostedOptimizer>> created = Build(
      std::move(id), std::move(unique_id), std::move(spec), policy,
      [&](const engine::Layout& layout) { return HostedMemory::Create(layout, description, binding); }, budget, pool,
      observer);
  if (created.ok()) {
    (*created)->engine_->AwaitFirstFill();
    (*created)->set_run(Draw());
    (*created)->set_seed((*created)->spec_.seed);
  }
  return created;
}

absl::StatusOr<std::unique_ptr<HostedOptimizer>> HostedOptimizer::Adopt(
    OptimizerId id, std::string unique_id, engine::OptimizerSpec spec, engine::SpeculationPolicy policy,
    HostedMemory& memory, memory::MemoryBudget* budget, engine::WorkerPool* pool, OptimizerObserver* observer) {
  const auto checked = [&](const engine::Layout& layout) -> absl::StatusOr<HostedMemory> {
    if (absl::Status status = memory.Check(layout); !status.ok()) return status;
    return std::move(memory);
  };
  absl::StatusOr<std::unique_ptr<HostedOptimizer>> adopted =
      Build(std::move(id), std::move(unique_id), std::move(spec), policy, checked, budget, pool, observer);
  if (!adopted.ok()) return adopted;
  HostedOptimizer& hosted = **adopted;
  if (hosted.run() == 0) hosted.set_run(Draw());
  if (const engine::Record::Trainer trainer = hosted.record_.trainer(); trainer.pid != 0) {
    absl::MutexLock lock(&hosted.mu_);
    hosted.expected_ =
        trainer.pid == kUnknownPid ? Process{} : Process{static_cast<pid_t>(trainer.pid), trainer.start_time};
    hosted.expected_until_ = std::chrono::steady_clock::now() + kReturnTime;
  }
  return adopted;
}

absl::StatusOr<std::unique_ptr<HostedOptimizer>> HostedOptimizer::Build(
    OptimizerId id, std::string unique_id, engine::OptimizerSpec spec, engine::SpeculationPolicy policy,
    const std::function<absl::StatusOr<HostedMemory>(const engine::Layout&)>& provide, memory::MemoryBudget* budget,
    engine::WorkerPool* pool, OptimizerObserver* observer) {
  absl::StatusOr<engine::Layout> layout = engine::PlanLayout(spec);
  if (!layout.ok()) return layout.status();
  absl::StatusOr<memory::MemoryReservation> reservation =
      budget->Reserve(absl::StrCat("optimizer \"", id.name, "\""), id.uid, HostedMemory::Use(*layout, spec));
  if (!reservation.ok()) return reservation.status();
  absl::StatusOr<HostedMemory> memory = provide(*layout);
  if (!memory.ok()) return memory.status();
  std::unique_ptr<HostedOptimizer> optimizer(new HostedOptimizer(std::move(id), std::move(unique_id), std::move(spec),
                                                                 *std::move(layout), *std::move(reservation),
                                                                 *std::move(memory), observer));
  optimizer->StartEngine(policy, pool);
  return optimizer;
}

void HostedOptimizer::StartEngine(engine::SpeculationPolicy policy, engine::WorkerPool* pool) {
  engine::StepObserver* const step_observer = this;  // a private base: only visible here
  engine_ =
      std::make_unique<engine::StepEngine>(&layout_, spec_.groups, memory_.view(layout_), policy, pool, step_observer);
  engine_->SetName(id_.name);
  if (spec_.member.ranks > 1) engine_->RequireTotals();
}

HostedOptimizer::HostedOptimizer(OptimizerId id, std::string unique_id, engine::OptimizerSpec spec,
                                 engine::Layout layout, memory::MemoryReservation reservation, HostedMemory memory,
                                 OptimizerObserver* observer)
    : gives_back_(reservation.use().metadata_bytes),
      id_(std::move(id)),
      unique_id_(std::move(unique_id)),
      spec_(std::move(spec)),
      layout_(std::move(layout)),
      reservation_(std::move(reservation)),
      create_time_(absl::Now()),
      observer_(observer),
      memory_(std::move(memory)),
      record_(memory_.record.data(), layout_) {}

HostedOptimizer::~HostedOptimizer() {
  const uint64_t epoch = attachment().epoch;
  if (epoch != 0) RequestDetach(epoch, absl::UnavailableError("the optimizer is being deleted"));
  std::shared_ptr<transport::Transport> last;
  {
    absl::MutexLock lock(&mu_);
    last = std::move(transport_);
  }
  // Its destructor joins the thread, whose last act takes the lock.
}

absl::Status HostedOptimizer::Attach(const AttachedTrainer& info, Sync sync,
                                     const std::vector<uint32_t>& parameter_crc32,
                                     std::function<void(const absl::Status&)> on_end) {
  if (absl::Status status = engine_->CheckComplete(/*before_push=*/sync == Sync::kPush); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat("optimizer \"", id_.name, "\": ", status.message()));
  }
  // A trainer that filled the next slot would overwrite what is prepared.
  if (absl::Status status = engine_->CheckNotPrepared("attaching"); !status.ok()) return status;
  if (absl::Status status = Claim(info); !status.ok()) return status;
  absl::Status status = Synchronize(sync, parameter_crc32);
  absl::StatusOr<transport::RingMemory> ring =
      status.ok() ? transport::RingMemory::Create(info.epoch, layout_.buckets.size(), GroupEntries(spec_))
                  : absl::StatusOr<transport::RingMemory>(status);
  if (!ring.ok()) {
    Release();
    return ring.status();
  }
  const Process trainer = FindProcess(info.peer.pid);
  auto transport = std::make_shared<transport::Transport>(
      *std::move(ring), info.epoch, engine_.get(),
      [this, trainer, on_end = std::move(on_end)](const absl::Status& reason) {
        engine_->Detach();
        AwaitEnd(trainer, kEndLimit);
        Release(/*comes_back=*/absl::IsUnavailable(reason));  // the daemon is being restarted
        on_end(reason);
      });
  engine_->Attach(transport.get());
  {
    absl::MutexLock lock(&mu_);
    if (status = transport->Start(); status.ok()) transport_ = transport;
    if (status.ok()) status = early_detach_;
  }
  if (absl::IsResourceExhausted(status)) {  // it did not start
    engine_->Detach();
    Release();
    return status;
  }
  if (!status.ok()) transport->RequestEnd(status);
  return absl::OkStatus();
}

absl::Status HostedOptimizer::Restore(const AttachedTrainer& info, const engine::StepEngine::Moment& moment,
                                      uint64_t lineage, const std::function<absl::Status()>& load) {
  if (absl::Status status = Claim(info); !status.ok()) return status;
  const absl::Status status = engine_->WaitRestored(moment, [&] {
    engine_->SetLineage(lineage == 0 ? Draw() : lineage);  // while the record says that it is restored
    return load();
  });
  Release();
  return status;
}

absl::StatusOr<engine::RunReport> HostedOptimizer::Report(const AttachedTrainer& info) {
  if (absl::Status status = Claim(info); !status.ok()) return status;
  absl::StatusOr<engine::RunReport> report = engine_->WaitReported();
  Release();
  return report;
}

absl::Status HostedOptimizer::CommitPrepared(const AttachedTrainer& info, uint64_t attempt,
                                             const engine::Record::RunTerms& terms) {
  if (absl::Status status = Claim(info); !status.ok()) return status;
  const absl::Status status = engine_->WaitPreparedCommitted(attempt, terms);
  Release();
  return status;
}

absl::Status HostedOptimizer::AbandonPrepared(const AttachedTrainer& info, uint64_t attempt) {
  if (absl::Status status = Claim(info); !status.ok()) return status;
  const absl::Status status = engine_->WaitPreparedAbandoned(attempt);
  Release();
  return status;
}

absl::Status HostedOptimizer::Claim(const AttachedTrainer& info) {
  std::shared_ptr<transport::Transport> last;  // its thread is joined after the lock is released
  auto loans = std::make_shared<Loans>();
  SUPEROFFLOAD_CHECK(info.epoch != 0, "epoch 0 is of no attachment; optimizer ", id_.name);
  absl::MutexLock lock(&mu_);
  if (expected_ && info.peer.pid == expected_->pid) expected_.reset();  // here it is
  if (absl::Status status = Unused(); !status.ok()) return status;
  attachment_ = info;
  const Process process = FindProcess(info.peer.pid);
  record_.SetTrainer({process.pid == 0 ? kUnknownPid : static_cast<uint32_t>(process.pid), process.start_time});
  early_detach_ = absl::OkStatus();
  loans_ = std::move(loans);
  last = std::move(transport_);
  return absl::OkStatus();
}

void HostedOptimizer::Release(bool comes_back) {
  std::shared_ptr<Loans> over;  // unmapped after the lock is released
  absl::MutexLock lock(&mu_);
  SUPEROFFLOAD_CHECK(attachment_.epoch != 0, "optimizer ", id_.name, " is released but nobody has claimed it");
  attachment_ = AttachedTrainer{};
  over = std::move(loans_);
  if (!comes_back) record_.SetTrainer({});
}

void HostedOptimizer::SetUnreachable() {
  absl::MutexLock lock(&mu_);
  unreachable_ = true;
}

absl::Status HostedOptimizer::CheckUnused(bool lease_over) const {
  absl::MutexLock lock(&mu_);
  if (absl::Status status = Unused(); !status.ok()) return status;
  if (lease_over && unreachable_) return absl::OkStatus();
  return engine_->CheckNotPrepared("deleting the optimizer");
}

absl::Status HostedOptimizer::Unused() const {
  if (attachment_.epoch != 0) {
    return absl::FailedPreconditionError(absl::StrCat("optimizer \"", id_.name, "\" is attached to process ",
                                                      attachment_.peer.pid,
                                                      "; end that trainer or close its optimizer first"));
  }
  if (expected_ && MayRun(*expected_) && (expected_->pid != 0 || std::chrono::steady_clock::now() < expected_until_)) {
    return absl::FailedPreconditionError(
        absl::StrCat("optimizer \"", id_.name, "\" belongs to the trainer in process ", expected_->pid,
                     ", which was attached when the daemon was restarted; end that trainer first"));
  }
  return absl::OkStatus();
}

absl::Status HostedOptimizer::Synchronize(Sync sync, const std::vector<uint32_t>& parameter_crc32) {
  if (sync == Sync::kPush) return engine_->WaitSettled();
  // A trainer could write the parameter memory: publish the masters again rather than believe it.
  if (absl::Status status = engine_->WaitPulled(); !status.ok()) return status;
  return sync == Sync::kCheck ? CheckParameters(parameter_crc32) : absl::OkStatus();
}

absl::Status HostedOptimizer::CheckParameters(const std::vector<uint32_t>& parameter_crc32) const {
  if (parameter_crc32.size() != spec_.parameters.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter_crc32 has ", parameter_crc32.size(), " entries but optimizer \"", id_.name, "\" has ",
                     spec_.parameters.size(), " parameters; give one per parameter, in the order of creation"));
  }
  size_t different = 0;
  const std::string* first = nullptr;
  for (size_t i = 0; i < spec_.parameters.size(); ++i) {
    const engine::ParameterSpec& parameter = spec_.parameters[i];
    const size_t bytes = engine::ElementCount(parameter) * kernels::DTypeBytes(parameter.dtype);
    if (memory::Crc32(memory_.published(layout_).data() + layout_.placements[i].parameters_offset, bytes) ==
        parameter_crc32[i]) {
      continue;
    }
    if (different++ == 0) first = &parameter.name;
  }
  if (different == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(different, " of ", spec_.parameters.size(), " parameters differ from the masters of optimizer \"",
                   id_.name, "\", the first being \"", *first,
                   "\"; attach with push_params (the trainer's parameters win) or pull_params (the masters win)"));
}

void HostedOptimizer::RequestDetach(uint64_t epoch, const absl::Status& reason) {
  std::shared_ptr<transport::Transport> transport;
  {
    absl::MutexLock lock(&mu_);
    if (attachment_.epoch != epoch || epoch == 0) return;
    transport = transport_;
    if (transport == nullptr) early_detach_ = reason;
  }
  if (transport != nullptr) transport->RequestEnd(reason);
}

void HostedOptimizer::WaitDetached(uint64_t epoch) const {
  absl::MutexLock lock(&mu_);
  const auto detached = [this, epoch] {
    mu_.AssertHeld();
    return attachment_.epoch == 0 || attachment_.epoch != epoch;
  };
  mu_.Await(absl::Condition(&detached));
}

absl::StatusOr<std::shared_ptr<transport::Transport>> HostedOptimizer::TransportOf(uint64_t epoch) const {
  absl::MutexLock lock(&mu_);
  if (attachment_.epoch == epoch && transport_ != nullptr) return transport_;
  return absl::NotFoundError(absl::StrCat("attachment ", epoch, " has ended; attach again"));
}

absl::StatusOr<transport::AttachmentDescriptors> HostedOptimizer::Descriptors(uint64_t epoch) const {
  absl::StatusOr<std::shared_ptr<transport::Transport>> transport = TransportOf(epoch);
  if (!transport.ok()) return transport.status();
  const memory::SharedMemory& ring = (*transport)->ring_memory();
  absl::StatusOr<memory::FileDescriptor> fds[] = {ring.Duplicate(), memory_.published(layout_).Duplicate(),
                                                  memory_.gradients.Duplicate(), memory_.state.OpenReadOnly()};
  transport::AttachmentDescriptors descriptors;
  for (size_t i = 0; i < descriptors.fds.size(); ++i) {
    if (!fds[i].ok()) return fds[i].status();
    descriptors.fds[i] = *std::move(fds[i]);
  }
  descriptors.bytes = {ring.bytes(), memory_.published(layout_).bytes(), memory_.gradients.bytes(),
                       memory_.state.bytes()};
  return descriptors;
}

absl::StatusOr<uint64_t> HostedOptimizer::Lend(uint64_t bytes, bool held, const memory::Binding& binding) {
  if (bytes == 0) return absl::InvalidArgumentError("no bytes are asked for; ask for at least one");
  std::shared_ptr<Loans> loans;
  {
    absl::MutexLock lock(&mu_);
    loans = loans_;
  }
  if (loans == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("optimizer \"", id_.name, "\" has no trainer; attach first"));
  }
  absl::StatusOr<memory::MemoryReservation> reservation = reservation_.ReserveMore(
      absl::StrCat("memory for the trainer of optimizer \"", id_.name, "\""),
      {.state_bytes = 0, .gradients_bytes = 0, .parameters_bytes = 0, .metadata_bytes = 0, .lent_bytes = bytes});
  if (!reservation.ok()) return reservation.status();
  return held ? loans->Count(*std::move(reservation)) : loans->Lend(*std::move(reservation), binding);
}

absl::StatusOr<transport::LentMemory> HostedOptimizer::Lent(uint64_t epoch, uint64_t number) const {
  std::shared_ptr<Loans> loans;
  {
    absl::MutexLock lock(&mu_);
    if (attachment_.epoch == epoch) loans = loans_;
  }
  if (loans == nullptr) return absl::NotFoundError(absl::StrCat("attachment ", epoch, " has ended; attach again"));
  return loans->Find(number);
}

absl::Status HostedOptimizer::MapDevice(uint64_t epoch, const superoffload_device_request& request,
                                        std::span<const int> descriptors) {
  absl::StatusOr<std::shared_ptr<transport::Transport>> transport = TransportOf(epoch);
  if (!transport.ok()) return transport.status();
  return (*transport)->MapDevice(request, descriptors, MovedMemory());
}

transport::MovedMemory HostedOptimizer::MovedMemory() const {
  transport::MovedMemory moved{.gradients = {memory_.gradients.data(), memory_.gradients.bytes()},
                               .parameters = {memory_.published(layout_).data(), memory_.published(layout_).bytes()},
                               .buckets = {},
                               .committed_steps = [this] { return engine_->statistics().committed_steps; }};
  for (const engine::BucketLayout& bucket : layout_.buckets) {
    moved.buckets.push_back({.gradient_offsets = bucket.gradient_offsets,
                             .gradient_bytes = bucket.gradient_bytes(),
                             .log_offset = bucket.log_offset,
                             .log_slot_bytes = bucket.log_slot_bytes(),
                             .log_slots = bucket.log_slots,
                             .parameters_offset = bucket.parameters_offset,
                             .parameters_bytes = bucket.parameters_bytes(),
                             .chunks = bucket.chunks()});
  }
  return moved;
}

AttachedTrainer HostedOptimizer::attachment() const {
  absl::MutexLock lock(&mu_);
  return attachment_;
}

void HostedOptimizer::SetGpuUse(GpuUse use) {
  absl::MutexLock lock(&mu_);
  attachment_.gpu = std::move(use);
}

absl::Duration HostedOptimizer::lease() const {
  absl::MutexLock lock(&mu_);
  return lease_;
}

void HostedOptimizer::set_lease(absl::Duration lease) {
  absl::MutexLock lock(&mu_);
  lease_ = lease;
}

}  // namespace superoffload::optimizer
