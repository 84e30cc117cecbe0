// What of an optimizer may be long (groups, parameters, layout and parameter steps), page by page: no answer of the
// control plane grows with the model.
#ifndef SUPEROFFLOAD_SERVER_RPC_PLAN_PAGES_H_
#define SUPEROFFLOAD_SERVER_RPC_PLAN_PAGES_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "server/optimizer/hosted_optimizer.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::rpc {

// Adds the page that `page_token` names, the first one where it is empty, and the token of the next one. All pages
// merged are the whole. A page ends with the entry with which it has `page_bytes`. INVALID_ARGUMENT: the token is none
// of this optimizer's.
absl::Status AddPlanPage(const optimizer::HostedOptimizer& optimizer, const std::string& page_token, size_t page_bytes,
                         v1::Optimizer* page);

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_PLAN_PAGES_H_
