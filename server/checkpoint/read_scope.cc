#include "server/checkpoint/read_scope.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace superoffload::checkpoint {

ReadScope ReadScope::Of(const optimizer::HostedOptimizer& optimizer, std::function<bool()> cancelled) {
  return {.reserve = [&optimizer](const std::string& purpose,
                                  uint64_t bytes) { return optimizer.ReserveMetadata(purpose, bytes); },
          .cancelled = std::move(cancelled)};
}

ReadScope ReadScope::OfOwn(const optimizer::HostedOptimizer& optimizer) {
  constexpr uint64_t kOfTensor =
      64;  // that the header of its file has beside its name, and about that of each dimension
  uint64_t bytes = 0;
  for (const engine::ParameterSpec& parameter : optimizer.spec().parameters) {
    bytes += optimizer.spec().algorithm->arrays.size() *
             (parameter.name.size() + kOfTensor * (1 + parameter.global_shape.size()));
  }
  return {.max_index_bytes = MaxIndexBytes(bytes)};
}

absl::Status ReadScope::CheckGoesOn() const {
  return cancelled && cancelled() ? absl::CancelledError("the call was cancelled, and reads no more")
                                  : absl::OkStatus();
}

absl::StatusOr<memory::MemoryReservation> ReadScope::ReserveParsing(const std::string& path,
                                                                    uint64_t text_bytes) const {
  if (!reserve || text_bytes <= kFreeTextBytes) return memory::MemoryReservation();
  return reserve(absl::StrCat("reading ", path, ", of which ", text_bytes, " bytes are JSON,"),
                 kParsedBytesPerByte * text_bytes);
}

absl::StatusOr<memory::MemoryReservation> ReadScope::ReserveKept(const std::string& path, uint64_t bytes) const {
  if (!reserve) return memory::MemoryReservation();
  return reserve(absl::StrCat("what is in ", path), bytes);
}

}  // namespace superoffload::checkpoint
