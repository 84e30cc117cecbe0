#include "server/optimizer/loans.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace superoffload::optimizer {

constexpr size_t kMostLoans = 1024;  // each has a descriptor

absl::StatusOr<uint64_t> Loans::Lend(memory::MemoryReservation reservation, memory::Binding binding) {
  binding.from_pool = false;  // trainers write it
  absl::StatusOr<memory::SharedMemory> created =
      memory::SharedMemory::Create("superoffload-lent", reservation.use().lent_bytes, binding);
  if (!created.ok()) return created.status();
  return Add({std::move(reservation), *std::move(created)});
}

absl::StatusOr<uint64_t> Loans::Count(memory::MemoryReservation reservation) {
  return Add({std::move(reservation), memory::SharedMemory()});
}

absl::StatusOr<uint64_t> Loans::Add(Loan loan) {
  absl::MutexLock lock(&mu_);
  if (loans_.size() == kMostLoans) {
    return absl::ResourceExhaustedError(absl::StrCat("memory was lent ", kMostLoans, " times; ask for more at once"));
  }
  loans_.push_back(std::move(loan));
  return loans_.size();
}

absl::StatusOr<transport::LentMemory> Loans::Find(uint64_t number) const {
  absl::MutexLock lock(&mu_);
  if (number == 0 || number > loans_.size() || loans_[number - 1].memory.bytes() == 0) {
    return absl::NotFoundError(
        absl::StrCat("no memory ", number, " was lent to this attachment; LendMemory lends some"));
  }
  const memory::SharedMemory& memory = loans_[number - 1].memory;
  absl::StatusOr<memory::FileDescriptor> fd = memory.Duplicate();
  if (!fd.ok()) return fd.status();
  return transport::LentMemory{*std::move(fd), memory.bytes()};
}

}  // namespace superoffload::optimizer
