// Optimizers that outlive the daemon: their description, and how a successor hosts them.
#ifndef SUPEROFFLOAD_SERVER_RPC_DURABLE_H_
#define SUPEROFFLOAD_SERVER_RPC_DURABLE_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/optimizer/optimizer_table.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::rpc {

// A serialized DurableOptimizer.
std::string Describe(uid_t uid, const v1::CreateOptimizerRequest& request);

// Hosts the optimizer whose memory `fds` are, and returns its name. DATA_LOSS, FAILED_PRECONDITION: the memory is
// damaged or of another version, and stays as it is.
absl::StatusOr<std::string> Adopt(optimizer::OptimizerTable& table, std::vector<memory::FileDescriptor> fds);

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_DURABLE_H_
