// One optimizer: its memory, its engine, and the attachment of its trainer. It outlives trainers.
#ifndef SUPEROFFLOAD_SERVER_OPTIMIZER_HOSTED_OPTIMIZER_H_
#define SUPEROFFLOAD_SERVER_OPTIMIZER_HOSTED_OPTIMIZER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/engine/layout.h"
#include "server/engine/record.h"
#include "server/engine/spec.h"
#include "server/engine/step_engine.h"
#include "server/memory/give_back.h"
#include "server/memory/memory_budget.h"
#include "server/memory/shared_memory.h"
#include "server/optimizer/gpu_use.h"
#include "server/optimizer/hosted_memory.h"
#include "server/optimizer/loans.h"
#include "server/optimizer/optimizer_observer.h"
#include "server/optimizer/process.h"
#include "server/transport/descriptor_server.h"
#include "server/transport/transport.h"

namespace superoffload::optimizer {

// How trainer and daemon agree on the parameters at attach.
enum class Sync : uint8_t { kCheck, kPull, kPush };

// 16 random hexadecimal digits.
std::string NewUniqueId();

struct AttachedTrainer {
  uint64_t epoch = 0;
  transport::Peer peer;
  std::optional<GpuUse> gpu;
};

// Thread-safe.
class HostedOptimizer final : private engine::StepObserver {
 public:
  // Plans, reserves and allocates. `description` is kept with the memory, for whoever finds it. `budget`, `pool` and
  // `observer` must outlive the optimizer.
  static absl::StatusOr<std::unique_ptr<HostedOptimizer>> Create(
      OptimizerId id, std::string unique_id, engine::OptimizerSpec spec, engine::SpeculationPolicy policy,
      const std::string& description, const memory::Binding& binding, memory::MemoryBudget* budget,
      engine::WorkerPool* pool, OptimizerObserver* observer);

  // The same with the memory of an optimizer of this spec that another daemon hosted: it is brought to its last
  // committed step. A trainer that was attached to it has it for itself until it attaches anew or its process ends; one
  // whose process is not known, for some minutes. DATA_LOSS or FAILED_PRECONDITION: the memory is not that of the spec,
  // stays as it is, and is still the caller's, as after any error.
  static absl::StatusOr<std::unique_ptr<HostedOptimizer>> Adopt(OptimizerId id, std::string unique_id,
                                                                engine::OptimizerSpec spec,
                                                                engine::SpeculationPolicy policy, HostedMemory& memory,
                                                                memory::MemoryBudget* budget, engine::WorkerPool* pool,
                                                                OptimizerObserver* observer);

  // Ends the attachment and waits for it.
  ~HostedOptimizer() override;

  // Attaches the peer. After OK, `on_end(status)` is called once by another thread, possibly before Attach has
  // returned, when the attachment is over and its open step was abandoned or finished. FAILED_PRECONDITION: attached
  // already, or with kCheck the checksums (CRC-32 of each parameter, in order) differ from the masters'. DATA_LOSS: the
  // optimizer is incomplete, and kPush would not complete it.
  absl::Status Attach(const AttachedTrainer& info, Sync sync, const std::vector<uint32_t>& parameter_crc32,
                      std::function<void(const absl::Status&)> on_end);

  // Replaces the state, see StepEngine::WaitRestored. `lineage` 0: a new one is drawn. `info` counts as attached
  // meanwhile. FAILED_PRECONDITION: somebody is attached.
  absl::Status Restore(const AttachedTrainer& info, const engine::StepEngine::Moment& moment, uint64_t lineage,
                       const std::function<absl::Status()>& load);

  // For an agreement of all ranks of a run; see StepMachine. FAILED_PRECONDITION: somebody is attached.
  // `info` counts as attached meanwhile.
  absl::StatusOr<engine::RunReport> Report(const AttachedTrainer& info);
  absl::Status CommitPrepared(const AttachedTrainer& info, uint64_t attempt, const engine::Record::RunTerms& terms);
  absl::Status AbandonPrepared(const AttachedTrainer& info, uint64_t attempt);

  // Ends the attachment if it is still that one. Does not wait for its end.
  void RequestDetach(uint64_t epoch, const absl::Status& reason);

  // Waits until `epoch` is not the present attachment.
  void WaitDetached(uint64_t epoch) const;

  // NOT_FOUND unless `epoch` is the present attachment.
  absl::StatusOr<transport::AttachmentDescriptors> Descriptors(uint64_t epoch) const;

  // Maps GPU memory for that attachment; see Transport::MapDevice. NOT_FOUND as above.
  absl::Status MapDevice(uint64_t epoch, const superoffload_device_request& request, std::span<const int> descriptors);

  // The present attachment; epoch 0 when there is none.
  AttachedTrainer attachment() const;

  // FAILED_PRECONDITION while a trainer is attached, or is expected back after the daemon's restart, or a step is
  // prepared; but the end of the lease of an unreachable optimizer ends what it has prepared, too.
  absl::Status CheckUnused(bool lease_over) const;

  // Nobody chose its name: no trainer comes back to it, and no run can agree on what it has prepared.
  void SetUnreachable();

  // Of the present attachment.
  void SetGpuUse(GpuUse use);

  // How long it stays without a trainer before the table deletes it.
  absl::Duration lease() const;
  void set_lease(absl::Duration lease);

  // Ranks of a run go on together only if theirs are equal; made anew by every restore.
  uint64_t lineage() const { return record_.lineage(); }

  // Names the training run that checkpoints are of: drawn when the optimizer is created, and taken over from a
  // checkpoint of an optimizer of this name.
  uint64_t run() const { return record_.run(); }
  void set_run(uint64_t run) { record_.SetRun(run); }

  // Under which state is rounded stochastically. Set while nobody is attached.
  uint64_t seed() const { return record_.seed(); }
  void set_seed(uint64_t seed) { record_.SetSeed(seed); }

  uint32_t record_version() const { return record_.version(); }

  // Tells it from every other optimizer that has or had its name, in this daemon and its successors.
  const std::string& unique_id() const { return unique_id_; }

  engine::StepEngine& engine() { return *engine_; }
  const engine::StepEngine& engine() const { return *engine_; }
  const OptimizerId& id() const { return id_; }
  const engine::OptimizerSpec& spec() const { return spec_; }
  const engine::Layout& layout() const { return layout_; }
  const HostedMemory& memory() const { return memory_; }
  uint64_t memory_bytes() const { return reservation_.use().total_bytes(); }
  const memory::MemoryUse& memory_use() const { return reservation_.use(); }

  // Memory that something done for the optimizer takes meanwhile, of its user's share of the budget.
  // RESOURCE_EXHAUSTED: it is too small.
  absl::StatusOr<memory::MemoryReservation> ReserveMetadata(const std::string& purpose, uint64_t bytes) const {
    return reservation_.ReserveMore(
        purpose,
        {.state_bytes = 0, .gradients_bytes = 0, .parameters_bytes = 0, .metadata_bytes = bytes, .lent_bytes = 0});
  }

  // Lends the trainer of the present attachment memory until that ends, of its user's share of the budget, and returns
  // its number. `held`: the trainer has it already, from a daemon that died, and it is only counted. Takes as long as
  // the kernel does to find the pages. FAILED_PRECONDITION: nobody is attached. INVALID_ARGUMENT: no bytes.
  // RESOURCE_EXHAUSTED: the budget, or the kernel's memory, is too small, or there are too many loans.
  absl::StatusOr<uint64_t> Lend(uint64_t bytes, bool held, const memory::Binding& binding);

  // NOT_FOUND unless it was lent to that attachment.
  absl::StatusOr<transport::LentMemory> Lent(uint64_t epoch, uint64_t number) const;
  absl::Time create_time() const { return create_time_; }

 private:
  HostedOptimizer(OptimizerId id, std::string unique_id, engine::OptimizerSpec spec, engine::Layout layout,
                  memory::MemoryReservation reservation, HostedMemory memory, OptimizerObserver* observer);

  // `provide` makes or finds the memory for the layout that was planned.
  static absl::StatusOr<std::unique_ptr<HostedOptimizer>> Build(
      OptimizerId id, std::string unique_id, engine::OptimizerSpec spec, engine::SpeculationPolicy policy,
      const std::function<absl::StatusOr<HostedMemory>(const engine::Layout&)>& provide, memory::MemoryBudget* budget,
      engine::WorkerPool* pool, OptimizerObserver* observer);

  void StartEngine(engine::SpeculationPolicy policy, engine::WorkerPool* pool);

  void OnPass(const engine::PassReport& report) override { observer_->OnPass(id_, report); }
  void OnStep(const engine::StepReport& report) override { observer_->OnStep(id_, report); }

  // NOT_FOUND unless `epoch` is the present attachment.
  absl::StatusOr<std::shared_ptr<transport::Transport>> TransportOf(uint64_t epoch) const;
  transport::MovedMemory MovedMemory() const;
  absl::Status Synchronize(Sync sync, const std::vector<uint32_t>& parameter_crc32);
  absl::Status CheckParameters(const std::vector<uint32_t>& parameter_crc32) const;
  absl::Status Claim(const AttachedTrainer& info);
  void Release(bool comes_back = false);
  absl::Status Unused() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const memory::GivesBack gives_back_;  // destroyed last
  const OptimizerId id_;
  const std::string unique_id_;
  const engine::OptimizerSpec spec_;
  const engine::Layout layout_;
  const memory::MemoryReservation reservation_;
  const absl::Time create_time_;
  OptimizerObserver* const observer_;
  const HostedMemory memory_;
  engine::Record record_;  // the engine's; here for what concerns attachments
  std::unique_ptr<engine::StepEngine> engine_;

  mutable absl::Mutex mu_;
  absl::Duration lease_ ABSL_GUARDED_BY(mu_) = absl::InfiniteDuration();
  bool unreachable_ ABSL_GUARDED_BY(mu_) = false;
  AttachedTrainer attachment_ ABSL_GUARDED_BY(mu_);
  std::optional<Process> expected_ ABSL_GUARDED_BY(mu_);                       // was attached when the last daemon died
  std::chrono::steady_clock::time_point expected_until_ ABSL_GUARDED_BY(mu_);  // when it is not known
  absl::Status early_detach_ ABSL_GUARDED_BY(mu_);  // requested before the transport was there
  // Of the present attachment, or of the last one until the next is claimed. Shared with RequestDetach, which must not
  // hold the lock while it wakes the transport.
  std::shared_ptr<transport::Transport> transport_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Loans> loans_ ABSL_GUARDED_BY(mu_);  // of the present attachment
};

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_SERVER_OPTIMIZER_HOSTED_OPTIMIZER_H_
