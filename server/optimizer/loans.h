// Memory that is lent to the trainer of one attachment, for uses of its own: activations that leave its GPU, say.
#ifndef SUPEROFFLOAD_SERVER_OPTIMIZER_LOANS_H_
#define SUPEROFFLOAD_SERVER_OPTIMIZER_LOANS_H_

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/memory/memory_budget.h"
#include "server/memory/shared_memory.h"
#include "server/transport/descriptor_server.h"

namespace superoffload::optimizer {

// Thread-safe. What was lent is given back when this ends; a trainer that keeps it mapped keeps it alive.
class Loans {
 public:
  // Lends what was reserved, and returns its number. RESOURCE_EXHAUSTED: the kernel has no memory for it, or there are
  // too many loans. FAILED_PRECONDITION: it cannot lie where it should.
  absl::StatusOr<uint64_t> Lend(memory::MemoryReservation reservation, memory::Binding binding);

  // The trainer has it already. RESOURCE_EXHAUSTED: there are too many loans.
  absl::StatusOr<uint64_t> Count(memory::MemoryReservation reservation);

  // NOT_FOUND: none of the number, or one that was only counted.
  absl::StatusOr<transport::LentMemory> Find(uint64_t number) const;

 private:
  struct Loan {
    memory::MemoryReservation reservation;
    memory::SharedMemory memory;  // of no bytes: it was only counted
  };
  absl::StatusOr<uint64_t> Add(Loan loan);

  mutable absl::Mutex mu_;
  std::vector<Loan> loans_ ABSL_GUARDED_BY(mu_);  // by number, from 1 on
};

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_SERVER_OPTIMIZER_LOANS_H_
