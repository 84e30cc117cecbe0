#include "server/engine/record.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "server/memory/crc32.h"

namespace superoffload::engine {

struct Record::Header {
  uint64_t magic;
  uint32_t version;
  uint32_t groups;
  uint64_t chunks;
  uint32_t crc32;  // of what is above
  uint32_t incomplete;
  uint64_t committed;
  uint64_t trainer_start_time;
  uint64_t run;
  uint32_t trainer_pid;
  uint32_t reserved;
};

namespace {

constexpr uint64_t kMagic = 0x3144524346464f53;  // "SOFFCRD1"
constexpr uint32_t kVersion = 2;
constexpr size_t kHeaderBytes = 64;

size_t RoundUp(size_t bytes) { return (bytes + 63) / 64 * 64; }
size_t ConstantsBytes(size_t groups) { return RoundUp(2 * groups * sizeof(kernels::AdamStep)); }
size_t AbsorbedBytes(size_t chunks) { return RoundUp(chunks * sizeof(uint64_t)); }

}  // namespace

size_t Record::Bytes(size_t groups, size_t chunks) {
  return kHeaderBytes + ConstantsBytes(groups) + AbsorbedBytes(chunks) + kMaxWorkers * sizeof(kernels::UndoSlot);
}

Record::Record(std::byte* memory, size_t groups, size_t chunks)
    : header_(reinterpret_cast<Header*>(memory)),
      groups_(groups),
      chunks_(chunks),
      constants_(reinterpret_cast<kernels::AdamStep*>(memory + kHeaderBytes)),
      absorbed_(reinterpret_cast<uint64_t*>(memory + kHeaderBytes + ConstantsBytes(groups))),
      slots_(reinterpret_cast<kernels::UndoSlot*>(memory + kHeaderBytes + ConstantsBytes(groups) +
                                                  AbsorbedBytes(chunks))) {
  static_assert(sizeof(Header) == kHeaderBytes);
  if (header_->magic != 0) return;
  header_->version = kVersion;
  header_->groups = static_cast<uint32_t>(groups);
  header_->chunks = chunks;
  kernels::KeepOrder();
  header_->magic = kMagic;
  header_->crc32 = memory::Crc32(header_, offsetof(Header, crc32));
}

absl::Status Record::Check() const {
  if (header_->magic != kMagic || header_->version != kVersion) {
    return absl::FailedPreconditionError(absl::StrCat("the optimizer's record is of format version ", header_->version,
                                                      ", this daemon knows version ", kVersion,
                                                      "; recover it with a daemon of that version"));
  }
  if (header_->crc32 != memory::Crc32(header_, offsetof(Header, crc32))) {
    return absl::DataLossError("the header of the optimizer's record is damaged; delete the optimizer");
  }
  if (header_->groups != groups_ || header_->chunks != chunks_) {
    return absl::FailedPreconditionError(absl::StrCat("the optimizer's record has ", header_->groups, " groups and ",
                                                      header_->chunks, " chunks but its plan ", groups_, " and ",
                                                      chunks_, "; it does not belong to this plan"));
  }
  const auto possible = [t = header_->committed](uint64_t absorbed) { return absorbed <= t && t - absorbed <= 2; };
  if (complete() && !std::all_of(absorbed_, absorbed_ + chunks_, possible)) {
    return absl::DataLossError("the optimizer's record is damaged; delete the optimizer and restore a checkpoint");
  }
  return absl::OkStatus();
}

uint64_t Record::committed() const { return header_->committed; }

Record::Trainer Record::trainer() const { return {header_->trainer_pid, header_->trainer_start_time}; }

void Record::SetTrainer(const Trainer& trainer) {
  header_->trainer_pid = 0;
  kernels::KeepOrder();
  header_->trainer_start_time = trainer.start_time;
  kernels::KeepOrder();
  header_->trainer_pid = trainer.pid;
}

uint64_t Record::run() const { return header_->run; }

void Record::SetRun(uint64_t run) { header_->run = run; }

Incompleteness Record::incompleteness() const { return static_cast<Incompleteness>(header_->incomplete); }

void Record::MarkNeverFilled() { header_->incomplete = static_cast<uint32_t>(Incompleteness::kNeverFilled); }

void Record::BeginPush() {
  header_->incomplete = static_cast<uint32_t>(Incompleteness::kPushing);
  kernels::KeepOrder();
}

void Record::EndPush() {
  kernels::KeepOrder();
  header_->incomplete = 0;
}

void Record::BeginRestore() {
  header_->incomplete = static_cast<uint32_t>(Incompleteness::kRestoring);
  kernels::KeepOrder();
}

void Record::EndRestore(uint64_t committed) {
  header_->committed = committed;
  std::fill_n(absorbed_, chunks_, committed);
  kernels::KeepOrder();
  header_->incomplete = 0;
}

void Record::Commit(std::span<const kernels::AdamStep> constants) {
  const uint64_t t = header_->committed + 1;
  std::copy(constants.begin(), constants.end(), constants_ + (t % 2) * groups_);
  kernels::KeepOrder();
  header_->committed = t;
  kernels::KeepOrder();
}

const kernels::AdamStep& Record::Constants(uint64_t t, uint32_t group) const {
  return constants_[(t % 2) * groups_ + group];
}

kernels::UndoSlot* Record::BeginAbsorb(size_t worker, size_t chunk, uint64_t t) {
  kernels::BeginUndo(slots_[worker], t << 32 | (chunk + 1));
  return &slots_[worker];
}

void Record::EndAbsorb(size_t worker, size_t chunk, uint64_t t) {
  kernels::KeepOrder();
  absorbed_[chunk] = t;
  kernels::EndUndo(slots_[worker]);
}

}  // namespace superoffload::engine
