// CreateOptimizer with `validate_only`: what would be created.
#ifndef SUPEROFFLOAD_SERVER_RPC_PREVIEW_H_
#define SUPEROFFLOAD_SERVER_RPC_PREVIEW_H_

#include "absl/status/statusor.h"
#include "server/engine/spec.h"
#include "server/memory/memory_budget.h"
#include "server/optimizer/optimizer_table.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::rpc {

// Errors: see OptimizerTable::Plan.
absl::StatusOr<v1::Optimizer> Preview(const optimizer::OptimizerTable& table, const transport::Peer& peer,
                                      const v1::CreateOptimizerRequest& request, const engine::OptimizerSpec& spec);

void SetMemoryUse(const memory::MemoryUse& use, v1::Optimizer* proto);

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_PREVIEW_H_
