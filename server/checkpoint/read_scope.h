// On whose behalf files of checkpoints are read: what memory that may take, and whether it is to go on. How large an
// index is, or the header of a file, is the choice of whoever wrote it, and parsed it takes many times as much.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_READ_SCOPE_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_READ_SCOPE_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/index.h"
#include "server/memory/memory_budget.h"
#include "server/optimizer/hosted_optimizer.h"

namespace superoffload::checkpoint {

// Of JSON, parsed: per byte of its text. Nothing that is valid takes more ("[],[],[]": 24, and the text).
inline constexpr uint64_t kParsedBytesPerByte = 25;
// Texts up to this size are nobody's charge: there are so many calls at a time, and an optimizer that fills the budget
// can be restored.
inline constexpr uint64_t kFreeTextBytes = uint64_t{256} << 10;

// The default is that of a program of the user's own: nothing is charged, nothing is cancelled.
struct ReadScope {
  std::function<absl::StatusOr<memory::MemoryReservation>(const std::string& purpose, uint64_t bytes)> reserve{};
  std::function<bool()> cancelled{};
  uint64_t max_index_bytes = kMaxIndexBytes;

  // Charged to the optimizer's user. `optimizer` must outlive it.
  static ReadScope Of(const optimizer::HostedOptimizer& optimizer, std::function<bool()> cancelled = {});

  // To look for checkpoints that an optimizer has written itself: indexes are no larger than its own can be, so nothing
  // is charged, and what it has written is found however full the budget is.
  static ReadScope OfOwn(const optimizer::HostedOptimizer& optimizer);

  // CANCELLED: nobody waits for what is read.
  absl::Status CheckGoesOn() const;

  // For as long as the JSON of so many bytes in `path` is parsed. RESOURCE_EXHAUSTED: the budget, or the user's share
  // of it, is too small.
  absl::StatusOr<memory::MemoryReservation> ReserveParsing(const std::string& path, uint64_t text_bytes) const;

  // For what is kept of it.
  absl::StatusOr<memory::MemoryReservation> ReserveKept(const std::string& path, uint64_t bytes) const;
};

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_READ_SCOPE_H_
