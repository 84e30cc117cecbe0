// The optimizers that this daemon hosts, and who may see which.
#ifndef SUPEROFFLOAD_SERVER_OPTIMIZER_OPTIMIZER_TABLE_H_
#define SUPEROFFLOAD_SERVER_OPTIMIZER_OPTIMIZER_TABLE_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/optimizer/descriptor_store.h"
#include "server/optimizer/hosted_optimizer.h"
#include "server/optimizer/lease_timer.h"

namespace superoffload::optimizer {

// Shared because a call may still use an optimizer that another call deletes.
using OptimizerPtr = std::shared_ptr<HostedOptimizer>;

// How many optimizers there may be. Those that a predecessor left are taken over all the same.
struct OptimizerLimits {
  size_t per_user = 1024;
  size_t total = std::numeric_limits<size_t>::max();
};

// Thread-safe. A peer sees the optimizers of its own user, an operator those of all.
class OptimizerTable {
 public:
  // All must outlive the table.
  OptimizerTable(const OptimizerLimits& limits, const memory::Binding& binding, memory::MemoryBudget* budget,
                 engine::WorkerPool* pool, OptimizerObserver* observer, DescriptorStore* store)
      : limits_(limits),
        binding_(binding),
        budget_(budget),
        pool_(pool),
        observer_(observer),
        store_(store),
        leases_([this](const OptimizerId& id) { Expire(id); }) {}

  ~OptimizerTable() { Shutdown(); }

  // INVALID_ARGUMENT, ALREADY_EXISTS, RESOURCE_EXHAUSTED, UNAVAILABLE after Shutdown.
  absl::StatusOr<OptimizerPtr> Create(const transport::Peer& peer, const std::string& name, engine::OptimizerSpec spec,
                                      engine::SpeculationPolicy policy, const std::string& description,
                                      std::string unique_id = NewUniqueId());

  // What Create would make of it, without making anything.
  struct Preview {
    engine::Layout layout;
    memory::MemoryUse use;
    absl::Status room;  // RESOURCE_EXHAUSTED, with the numbers: the budget does not hold it now
  };
  // INVALID_ARGUMENT, ALREADY_EXISTS, UNAVAILABLE as of Create; RESOURCE_EXHAUSTED: the user has too many optimizers.
  absl::StatusOr<Preview> Plan(const transport::Peer& peer, const std::string& name,
                               const engine::OptimizerSpec& spec) const;

  // Deletes the optimizer when no trainer has been attached to it for so long.
  void SetLease(const OptimizerPtr& optimizer, absl::Duration lease);

  // Whether it was not deleted yet.
  bool Hosts(const HostedOptimizer& optimizer) const;

  // Hosts an optimizer whose memory a predecessor left in the descriptor store. See HostedOptimizer::Adopt.
  absl::StatusOr<OptimizerPtr> Adopt(const OptimizerId& id, std::string unique_id, engine::OptimizerSpec spec,
                                     engine::SpeculationPolicy policy, HostedMemory& memory);

  // Memory of an optimizer that this daemon cannot host. It stays in the descriptor store, and its name taken, until
  // somebody deletes it or a daemon that can host it comes.
  struct Damaged {
    OptimizerId id;
    absl::Status reason;
    uint64_t memory_bytes = 0;
  };
  void HoldDamaged(const OptimizerId& id, const absl::Status& reason, std::vector<memory::FileDescriptor> fds);

  // Further descriptors of the memory of a damaged optimizer. NOT_FOUND, FAILED_PRECONDITION as of Get, and when it is
  // not damaged.
  struct DamagedDescriptors {
    OptimizerId id;
    std::vector<memory::FileDescriptor> fds;
  };
  absl::StatusOr<DamagedDescriptors> GetDamaged(const transport::Peer& peer, const std::string& name) const;

  // For work on an optimizer outside of the table.
  engine::WorkerPool* pool() const { return pool_; }
  memory::MemoryBudget* budget() const { return budget_; }

  // The optimizer that the descriptor store knows by this name. NOT_FOUND: it is no optimizer's.
  static absl::StatusOr<OptimizerId> IdInStore(const std::string& store_name);

  // A peer's own comes first; UID/NAME is that of another user. NOT_FOUND. FAILED_PRECONDITION: only others have one,
  // and several. DATA_LOSS: it is damaged.
  absl::StatusOr<OptimizerPtr> Get(const transport::Peer& peer, const std::string& name) const;

  std::vector<OptimizerPtr> List(const transport::Peer& peer) const;
  std::vector<Damaged> ListDamaged(const transport::Peer& peer) const;
  static bool MaySee(const transport::Peer& peer, const OptimizerId& id);

  // NOT_FOUND, FAILED_PRECONDITION as of Get, and while a trainer uses it.
  absl::Status Delete(const transport::Peer& peer, const std::string& name);

  // Attaches under a fresh epoch, which it returns. See HostedOptimizer::Attach.
  absl::StatusOr<uint64_t> Attach(const transport::Peer& peer, const OptimizerPtr& optimizer, Sync sync,
                                  const std::vector<uint32_t>& parameter_crc32,
                                  std::function<void(const absl::Status&)> on_end);

  // A name for an attachment. UNAVAILABLE after Shutdown.
  absl::StatusOr<uint64_t> NewEpoch();

  // For the descriptor socket: what the session's attachment shares, and the end of a session's attachments.
  absl::StatusOr<transport::AttachmentDescriptors> Descriptors(const transport::Peer& peer, uint64_t epoch) const;

  // Memory that was lent to that attachment's trainer. NOT_FOUND.
  absl::StatusOr<transport::LentMemory> Lent(const transport::Peer& peer, uint64_t epoch, uint64_t number) const;

  // Where memory of optimizers lies.
  const memory::Binding& binding() const { return binding_; }

  // Maps GPU memory for that attachment; see Transport::MapDevice.
  absl::Status MapDevice(const transport::Peer& peer, const superoffload_device_request& request,
                         std::span<const int> descriptors) const;
  void OnSessionEnd(const transport::Peer& peer);

  // Refuses new optimizers and attachments, ends all attachments, waits for their end and settles every optimizer.
  void Shutdown();

  // Of all optimizers, by NUMA node.
  std::map<int, uint64_t> BytesByNode() const;
  uint64_t Elements() const;  // of parameters

  // Of every attachment that has told.
  std::vector<std::pair<OptimizerId, GpuUse>> GpuUses() const;

  size_t size() const;
  size_t attachments() const;

 private:
  // The optimizer with that attachment of the peer's. NOT_FOUND.
  absl::StatusOr<OptimizerPtr> Attached(const transport::Peer& peer, uint64_t epoch) const;

  struct DamagedMemory {
    absl::Status reason;
    std::vector<memory::FileDescriptor> fds;
    memory::MemoryReservation reservation;  // where the budget has room
    uint64_t bytes = 0;
  };

  // Whether an optimizer of that name may be created.
  absl::Status Admit(const OptimizerId& id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // ABORTED: a call that creates it has not ended.
  absl::Status CheckNotInMaking(const OptimizerId& id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<OptimizerId> Find(const transport::Peer& peer, const std::string& name) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What Find has found and is not damaged.
  const OptimizerPtr& Hosted(const OptimizerId& id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<OptimizerPtr> All() const;
  void StartLease(const HostedOptimizer& optimizer);
  void Expire(const OptimizerId& id);
  absl::Status Erase(const OptimizerPtr& optimizer, bool lease_over);

  const OptimizerLimits limits_;
  const memory::Binding binding_;
  memory::MemoryBudget* const budget_;
  engine::WorkerPool* const pool_;
  OptimizerObserver* const observer_;
  DescriptorStore* const store_;
  mutable absl::Mutex mu_;
  std::map<OptimizerId, OptimizerPtr> optimizers_ ABSL_GUARDED_BY(mu_);  // null while being created
  std::map<OptimizerId, DamagedMemory> damaged_ ABSL_GUARDED_BY(mu_);
  uint64_t last_epoch_ ABSL_GUARDED_BY(mu_) = 0;
  bool shutting_down_ ABSL_GUARDED_BY(mu_) = false;
  LeaseTimer leases_;  // the last one: its thread uses the others
};

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_SERVER_OPTIMIZER_OPTIMIZER_TABLE_H_
