// A call whose request comes in pages and that has one answer.
#ifndef SUPEROFFLOAD_SERVER_RPC_PAGED_CALL_H_
#define SUPEROFFLOAD_SERVER_RPC_PAGED_CALL_H_

#include <grpcpp/support/server_callback.h>
#include <sys/types.h>

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "server/memory/memory_budget.h"
#include "server/rpc/call_thread.h"
#include "server/rpc/paged_request.h"
#include "server/rpc/to_proto.h"

namespace superoffload::rpc {

// Deletes itself once gRPC is done with it.
template <typename Request>
class PagedCall final : public grpc::ServerReadReactor<Request> {
 public:
  // Calls `serve` with the whole request, in a thread of its own, since it may wait for memory and files. Until then a
  // client that sends slowly holds no thread.
  using Serve = std::function<absl::Status(const Request&)>;
  PagedCall(memory::MemoryBudget* budget, uid_t uid, Serve serve) : serve_(std::move(serve)), request_(budget, uid) {
    this->StartRead(&page_);
  }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return this->Finish(EndedEarly());
    if (absl::Status status = request_.Add(page_); !status.ok()) return this->Finish(ToGrpc(status));
    if (!request_.complete()) return this->StartRead(&page_);
    const absl::Status started = StartCallThread([this] { this->Finish(ToGrpc(serve_(request_.whole()))); });
    if (!started.ok()) this->Finish(ToGrpc(started));
  }

  void OnDone() override { delete this; }

  const Serve serve_;
  Request page_;
  PagedRequest<Request> request_;
};

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_PAGED_CALL_H_
