#include "server/optimizer/optimizer_table.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/base/check.h"

namespace superoffload::optimizer {
namespace {

constexpr size_t kMaxNameBytes = 128;

absl::Status ValidateName(const std::string& name) {
  const bool good = !name.empty() && name.size() <= kMaxNameBytes && std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  });
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("name: an optimizer's name has 1 to ", kMaxNameBytes, " characters out of A-Z a-z 0-9 . _ -"));
}

constexpr char kStorePrefix[] = "optimizer-";

std::string StoreName(const OptimizerId& id) { return absl::StrCat(kStorePrefix, id.uid, "-", id.name); }

absl::Status DamagedError(const OptimizerId& id, const absl::Status& reason) {
  return absl::DataLossError(
      absl::StrCat("the memory of optimizer \"", id.name, "\" cannot be used: ", reason.message(),
                   "; superoffloadctl export saves what is whole of it, delete frees it and its name"));
}

absl::Status ShuttingDown() {
  return absl::UnavailableError("the daemon is shutting down; connect again once it is back");
}

}  // namespace

absl::Status OptimizerTable::Admit(const OptimizerId& id) const {
  if (shutting_down_) return ShuttingDown();
  const auto same_user = [&id](const auto& entry) { return entry.first.uid == id.uid; };
  if (static_cast<size_t>(std::count_if(optimizers_.begin(), optimizers_.end(), same_user)) >= limits_.per_user) {
    return absl::ResourceExhaustedError(absl::StrCat("uid ", id.uid, " has ", limits_.per_user,
                                                     " optimizers; delete one or raise max_optimizers_per_user"));
  }
  if (optimizers_.size() + damaged_.size() >= limits_.total) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the daemon has the ", limits_.total,
                     " optimizers for which its limit of open files is enough; delete "
                     "one or raise the limit (ulimit -n, or LimitNOFILE= of its unit)"));
  }
  if (absl::Status status = CheckNotInMaking(id); !status.ok()) return status;
  if (damaged_.contains(id) || optimizers_.contains(id)) {
    return absl::AlreadyExistsError(
        absl::StrCat("optimizer \"", id.name, "\" exists; attach to it, delete it or choose another name"));
  }
  return absl::OkStatus();
}

absl::StatusOr<OptimizerTable::Preview> OptimizerTable::Plan(const transport::Peer& peer, const std::string& name,
                                                             const engine::OptimizerSpec& spec) const {
  if (absl::Status status = ValidateName(name); !status.ok()) return status;
  {
    absl::MutexLock lock(&mu_);
    if (absl::Status status = Admit({peer.uid, name}); !status.ok()) return status;
  }
  absl::StatusOr<engine::Layout> layout = engine::PlanLayout(spec);
  if (!layout.ok()) return layout.status();
  const memory::MemoryUse use = HostedMemory::Use(*layout, spec);
  absl::Status room = budget_->Check(absl::StrCat("optimizer \"", name, "\""), peer.uid, use);
  return Preview{*std::move(layout), use, std::move(room)};
}

absl::StatusOr<OptimizerPtr> OptimizerTable::Create(const transport::Peer& peer, const std::string& name,
                                                    engine::OptimizerSpec spec, engine::SpeculationPolicy policy,
                                                    const std::string& description, std::string unique_id) {
  if (absl::Status status = ValidateName(name); !status.ok()) return status;
  const OptimizerId id{peer.uid, name};
  {
    absl::MutexLock lock(&mu_);
    if (absl::Status status = Admit(id); !status.ok()) return status;
    optimizers_.emplace(id, nullptr);
  }
  // Allocating takes long: the name is reserved, the table is not locked.
  absl::StatusOr<std::unique_ptr<HostedOptimizer>> created = HostedOptimizer::Create(
      id, std::move(unique_id), std::move(spec), policy, description, binding_, budget_, pool_, observer_);
  absl::Status kept = created.status();
  if (kept.ok()) kept = store_->Keep(StoreName(id), (*created)->memory().fds());
  if (kept.ok()) observer_->OnHost(id, (*created)->unique_id(), (*created)->spec().member);
  absl::MutexLock lock(&mu_);
  const auto reserved = optimizers_.find(id);
  SUPEROFFLOAD_CHECK(reserved != optimizers_.end() && reserved->second == nullptr, "the name ", name,
                     " was reserved and is not any more");
  if (!kept.ok()) {
    optimizers_.erase(reserved);
    return kept;
  }
  return reserved->second = *std::move(created);
}

void OptimizerTable::SetLease(const OptimizerPtr& optimizer, absl::Duration lease) {
  optimizer->set_lease(lease);
  if (optimizer->attachment().epoch == 0) StartLease(*optimizer);
}

bool OptimizerTable::Hosts(const HostedOptimizer& optimizer) const {
  absl::MutexLock lock(&mu_);
  const auto found = optimizers_.find(optimizer.id());
  return found != optimizers_.end() && found->second.get() == &optimizer;
}

// Not of one that was deleted: its name may be another's by now.
void OptimizerTable::StartLease(const HostedOptimizer& optimizer) {
  absl::MutexLock lock(&mu_);
  const auto found = optimizers_.find(optimizer.id());
  if (found != optimizers_.end() && found->second.get() == &optimizer) {
    leases_.Start(optimizer.id(), optimizer.lease());
  }
}

void OptimizerTable::Expire(const OptimizerId& id) {
  OptimizerPtr optimizer;
  {
    absl::MutexLock lock(&mu_);
    const auto found = optimizers_.find(id);
    if (shutting_down_ || found == optimizers_.end()) return;
    optimizer = found->second;
  }
  if (optimizer == nullptr || Erase(optimizer, /*lease_over=*/true).ok()) return;
  // A trainer has attached at the last moment, or one that the daemon's restart has detached lives.
  if (optimizer->attachment().epoch == 0) StartLease(*optimizer);
}

absl::StatusOr<OptimizerPtr> OptimizerTable::Adopt(const OptimizerId& id, std::string unique_id,
                                                   engine::OptimizerSpec spec, engine::SpeculationPolicy policy,
                                                   HostedMemory& memory) {
  absl::StatusOr<std::unique_ptr<HostedOptimizer>> adopted =
      HostedOptimizer::Adopt(id, std::move(unique_id), std::move(spec), policy, memory, budget_, pool_, observer_);
  if (!adopted.ok()) return adopted.status();
  observer_->OnHost(id, (*adopted)->unique_id(), (*adopted)->spec().member);
  absl::MutexLock lock(&mu_);
  return optimizers_[id] = *std::move(adopted);
}

void OptimizerTable::HoldDamaged(const OptimizerId& id, const absl::Status& reason,
                                 std::vector<memory::FileDescriptor> fds) {
  DamagedMemory damaged{reason, std::move(fds), {}, 0};
  for (const memory::FileDescriptor& fd : damaged.fds) {
    struct stat file{};
    if (::fstat(fd.get(), &file) == 0) damaged.bytes += static_cast<uint64_t>(file.st_size);
  }
  const memory::MemoryUse use{
      .state_bytes = damaged.bytes, .gradients_bytes = 0, .parameters_bytes = 0, .metadata_bytes = 0, .lent_bytes = 0};
  absl::StatusOr<memory::MemoryReservation> reservation =
      budget_->Reserve(absl::StrCat("optimizer \"", id.name, "\""), id.uid, use);
  if (reservation.ok()) damaged.reservation = *std::move(reservation);
  absl::MutexLock lock(&mu_);
  damaged_.insert_or_assign(id, std::move(damaged));
}

absl::StatusOr<OptimizerTable::DamagedDescriptors> OptimizerTable::GetDamaged(const transport::Peer& peer,
                                                                              const std::string& name) const {
  absl::MutexLock lock(&mu_);
  absl::StatusOr<OptimizerId> id = Find(peer, name);
  if (!id.ok()) return id.status();
  const auto found = damaged_.find(*id);
  if (found == damaged_.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("optimizer \"", id->name, "\" is not damaged; take a checkpoint of it"));
  }
  DamagedDescriptors damaged{*std::move(id), {}};
  for (const memory::FileDescriptor& fd : found->second.fds) {
    damaged.fds.emplace_back(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
    if (!damaged.fds.back().valid()) return absl::ErrnoToStatus(errno, "duplicating a descriptor");
  }
  return damaged;
}

absl::StatusOr<OptimizerId> OptimizerTable::IdInStore(const std::string& store_name) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(absl::StripPrefix(store_name, kStorePrefix), absl::MaxSplits('-', 1));
  OptimizerId id{0, std::string(parts.second)};
  if (absl::StartsWith(store_name, kStorePrefix) && absl::SimpleAtoi(parts.first, &id.uid) &&
      ValidateName(id.name).ok()) {
    return id;
  }
  return absl::NotFoundError(
      absl::StrCat("\"", absl::CHexEscape(store_name), "\" is the name of no optimizer's memory"));
}

bool OptimizerTable::MaySee(const transport::Peer& peer, const OptimizerId& id) {
  return peer.is_operator || peer.uid == id.uid;
}

absl::Status OptimizerTable::CheckNotInMaking(const OptimizerId& id) const {
  const auto found = optimizers_.find(id);
  if (found == optimizers_.end() || found->second != nullptr) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat("optimizer \"", id.name, "\" is being made by another call; try again once that has ended"));
}

absl::StatusOr<OptimizerId> OptimizerTable::Find(const transport::Peer& peer, const std::string& name) const {
  OptimizerId id{peer.uid, name};
  const size_t slash = name.find('/');
  const bool other = slash != std::string::npos && absl::SimpleAtoi(name.substr(0, slash), &id.uid);
  if (other) id.name = name.substr(slash + 1);
  const auto known = [this](const OptimizerId& wanted) {
    mu_.AssertHeld();
    const auto found = optimizers_.find(wanted);
    return damaged_.contains(wanted) || (found != optimizers_.end() && found->second != nullptr);
  };
  if (MaySee(peer, id)) {
    if (known(id)) return id;
    if (absl::Status status = CheckNotInMaking(id); !status.ok()) return status;
  }
  std::set<uid_t> owners;
  for (const auto& [candidate, optimizer] : optimizers_) {
    if (!other && candidate.name == name && MaySee(peer, candidate) && known(candidate)) owners.insert(candidate.uid);
  }
  for (const auto& [candidate, memory] : damaged_) {
    if (!other && candidate.name == name && MaySee(peer, candidate)) owners.insert(candidate.uid);
  }
  if (owners.size() == 1) return OptimizerId{*owners.begin(), name};
  if (owners.empty()) {
    return absl::NotFoundError(absl::StrCat("you have no optimizer \"", name, "\"; list shows those that exist"));
  }
  return absl::FailedPreconditionError(absl::StrCat("the users ", absl::StrJoin(owners, ", "), " have an optimizer \"",
                                                    name, "\"; say whose it is, with --uid or as UID/", name));
}

const OptimizerPtr& OptimizerTable::Hosted(const OptimizerId& id) const {
  const auto found = optimizers_.find(id);
  SUPEROFFLOAD_CHECK(found != optimizers_.end() && found->second != nullptr, "optimizer ", id.name,
                     " was found and is not hosted");
  return found->second;
}

absl::StatusOr<OptimizerPtr> OptimizerTable::Get(const transport::Peer& peer, const std::string& name) const {
  absl::MutexLock lock(&mu_);
  absl::StatusOr<OptimizerId> id = Find(peer, name);
  if (!id.ok()) return id.status();
  if (const auto found = damaged_.find(*id); found != damaged_.end()) return DamagedError(*id, found->second.reason);
  return Hosted(*id);
}

std::vector<OptimizerPtr> OptimizerTable::List(const transport::Peer& peer) const {
  std::vector<OptimizerPtr> visible = All();
  std::erase_if(visible, [&](const OptimizerPtr& optimizer) { return !MaySee(peer, optimizer->id()); });
  return visible;
}

std::vector<OptimizerTable::Damaged> OptimizerTable::ListDamaged(const transport::Peer& peer) const {
  absl::MutexLock lock(&mu_);
  std::vector<Damaged> visible;
  for (const auto& [id, memory] : damaged_) {
    if (MaySee(peer, id)) visible.push_back({id, DamagedError(id, memory.reason), memory.bytes});
  }
  return visible;
}

absl::Status OptimizerTable::Delete(const transport::Peer& peer, const std::string& name) {
  OptimizerPtr optimizer;
  {
    absl::MutexLock lock(&mu_);
    absl::StatusOr<OptimizerId> id = Find(peer, name);
    if (!id.ok()) return id.status();
    if (damaged_.contains(*id)) {
      store_->Drop(StoreName(*id));
      damaged_.erase(*id);
      return absl::OkStatus();
    }
    optimizer = Hosted(*id);
  }
  return Erase(optimizer, /*lease_over=*/false);
}

absl::Status OptimizerTable::Erase(const OptimizerPtr& optimizer, bool lease_over) {
  const OptimizerId& id = optimizer->id();
  {
    absl::MutexLock lock(&mu_);
    if (absl::Status status = optimizer->CheckUnused(lease_over); !status.ok()) return status;
    if (const auto found = optimizers_.find(id); found == optimizers_.end() || found->second != optimizer) {
      return absl::NotFoundError(absl::StrCat("optimizer \"", id.name, "\" was deleted meanwhile"));
    }
    store_->Drop(StoreName(id));
    optimizers_.erase(id);
    leases_.Stop(id);
  }
  observer_->OnDelete(id);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> OptimizerTable::Attach(const transport::Peer& peer, const OptimizerPtr& optimizer, Sync sync,
                                                const std::vector<uint32_t>& parameter_crc32,
                                                std::function<void(const absl::Status&)> on_end) {
  const absl::StatusOr<uint64_t> epoch = NewEpoch();
  if (!epoch.ok()) return epoch.status();
  leases_.Stop(optimizer->id());
  const auto start_lease = [this, &hosted = *optimizer] { StartLease(hosted); };
  absl::Status status = optimizer->Attach({*epoch, peer, std::nullopt}, sync, parameter_crc32,
                                          [start_lease, on_end = std::move(on_end)](const absl::Status& reason) {
                                            start_lease();
                                            on_end(reason);
                                          });
  if (!status.ok()) {
    if (optimizer->attachment().epoch == 0) start_lease();
    return status;
  }
  return epoch;
}

absl::StatusOr<uint64_t> OptimizerTable::NewEpoch() {
  absl::MutexLock lock(&mu_);
  if (shutting_down_) return ShuttingDown();
  return ++last_epoch_;
}

absl::StatusOr<OptimizerPtr> OptimizerTable::Attached(const transport::Peer& peer, uint64_t epoch) const {
  for (OptimizerPtr& optimizer : All()) {
    const AttachedTrainer attachment = optimizer->attachment();
    if (attachment.epoch == epoch && attachment.peer.session == peer.session) return std::move(optimizer);
  }
  return absl::NotFoundError(
      absl::StrCat("attachment ", epoch, " is not one of this connection; attach with its token first"));
}

absl::StatusOr<transport::AttachmentDescriptors> OptimizerTable::Descriptors(const transport::Peer& peer,
                                                                             uint64_t epoch) const {
  absl::StatusOr<OptimizerPtr> optimizer = Attached(peer, epoch);
  if (!optimizer.ok()) return optimizer.status();
  return (*optimizer)->Descriptors(epoch);
}

absl::Status OptimizerTable::MapDevice(const transport::Peer& peer, const superoffload_device_request& request,
                                       std::span<const int> descriptors) const {
  const uint64_t epoch = request.header.attachment_epoch;
  absl::StatusOr<OptimizerPtr> optimizer = Attached(peer, epoch);
  if (!optimizer.ok()) return optimizer.status();
  return (*optimizer)->MapDevice(epoch, request, descriptors);
}

absl::StatusOr<transport::LentMemory> OptimizerTable::Lent(const transport::Peer& peer, uint64_t epoch,
                                                           uint64_t number) const {
  absl::StatusOr<OptimizerPtr> optimizer = Attached(peer, epoch);
  if (!optimizer.ok()) return optimizer.status();
  return (*optimizer)->Lent(epoch, number);
}

void OptimizerTable::OnSessionEnd(const transport::Peer& peer) {
  for (const OptimizerPtr& optimizer : All()) {
    const AttachedTrainer attachment = optimizer->attachment();
    if (attachment.epoch == 0 || attachment.peer.session != peer.session) continue;
    optimizer->RequestDetach(attachment.epoch, absl::CancelledError("the trainer closed its connection"));
  }
}

void OptimizerTable::Shutdown() {
  {
    absl::MutexLock lock(&mu_);
    shutting_down_ = true;
  }
  const std::vector<OptimizerPtr> all = All();
  for (const OptimizerPtr& optimizer : all) {
    optimizer->RequestDetach(optimizer->attachment().epoch, ShuttingDown());
  }
  for (const OptimizerPtr& optimizer : all) {
    optimizer->engine().Detach();
    // Cannot fail once nothing is attached.
    optimizer->engine().WaitSettled().IgnoreError();
  }
}

std::map<int, uint64_t> OptimizerTable::BytesByNode() const {
  std::map<int, uint64_t> by_node;
  for (const OptimizerPtr& optimizer : All()) {
    for (const auto& [node, bytes] : optimizer->memory().BytesByNode()) by_node[node] += bytes;
  }
  return by_node;
}

uint64_t OptimizerTable::Elements() const {
  uint64_t elements = 0;
  for (const OptimizerPtr& optimizer : All()) elements += engine::ElementCount(optimizer->spec());
  return elements;
}

std::vector<std::pair<OptimizerId, GpuUse>> OptimizerTable::GpuUses() const {
  std::vector<std::pair<OptimizerId, GpuUse>> uses;
  for (const OptimizerPtr& optimizer : All()) {
    if (AttachedTrainer attachment = optimizer->attachment(); attachment.gpu) {
      uses.emplace_back(optimizer->id(), *std::move(attachment.gpu));
    }
  }
  return uses;
}

size_t OptimizerTable::size() const { return All().size(); }

size_t OptimizerTable::attachments() const {
  const std::vector<OptimizerPtr> all = All();
  return static_cast<size_t>(std::count_if(
      all.begin(), all.end(), [](const OptimizerPtr& optimizer) { return optimizer->attachment().epoch != 0; }));
}

std::vector<OptimizerPtr> OptimizerTable::All() const {
  absl::MutexLock lock(&mu_);
  std::vector<OptimizerPtr> all;
  for (const auto& [id, optimizer] : optimizers_) {
    if (optimizer != nullptr) all.push_back(optimizer);
  }
  return all;
}

}  // namespace superoffload::optimizer
