// A request that comes in pages, each of which is charged to the memory budget until the request is destroyed: how long
// it becomes, and how many there are, is the clients' choice.
#ifndef SUPEROFFLOAD_SERVER_RPC_PAGED_REQUEST_H_
#define SUPEROFFLOAD_SERVER_RPC_PAGED_REQUEST_H_

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/memory/give_back.h"
#include "server/memory/memory_budget.h"

namespace superoffload::rpc {

// A plan of 2^20 parameters fits, with names of a hundred bytes.
inline constexpr size_t kMaxRequestBytes = 128 << 20;

// `Request` is a message with a field `more`.
template <typename Request>
class PagedRequest {
 public:
  // `budget` must outlive the request.
  PagedRequest(memory::MemoryBudget* budget, uid_t uid) : budget_(budget), uid_(uid) {}

  // Takes a page, and leaves nothing of it in `page`. RESOURCE_EXHAUSTED: the budget does not hold it, or the request
  // is too long.
  absl::Status Add(Request& page) {
    page.DiscardUnknownFields();
    bytes_ += page.ByteSizeLong();
    if (bytes_ > kMaxRequestBytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the request has more than ", kMaxRequestBytes, " bytes; use shorter names of parameters"));
    }
    absl::StatusOr<memory::MemoryReservation> reserved = budget_->Reserve(
        absl::StrCat("the request for optimizer \"", whole_.name().empty() ? page.name() : whole_.name(), "\""), uid_,
        {.state_bytes = 0,
         .gradients_bytes = 0,
         .parameters_bytes = 0,
         .metadata_bytes = kCopies * page.SpaceUsedLong(),
         .lent_bytes = 0});
    if (!reserved.ok()) return reserved.status();
    gives_back_.Add(reserved->use().metadata_bytes);
    reservations_.push_back(*std::move(reserved));
    complete_ = !page.more();
    whole_.MergeFrom(page);
    whole_.set_more(!complete_);  // merging never clears
    Request().Swap(&page);
    return absl::OkStatus();
  }

  // Whether the last page has come.
  bool complete() const { return complete_; }

  const Request& whole() const { return whole_; }

 private:
  // While it is served: the request, what it is translated to, and its description as a message and as text.
  static constexpr size_t kCopies = 4;

  memory::GivesBack gives_back_;  // destroyed last
  memory::MemoryBudget* const budget_;
  const uid_t uid_;
  size_t bytes_ = 0;
  bool complete_ = false;
  Request whole_;
  std::vector<memory::MemoryReservation> reservations_;
};

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_PAGED_REQUEST_H_
