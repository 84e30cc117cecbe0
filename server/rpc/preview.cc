#include "server/rpc/preview.h"

#include <string>

namespace superoffload::rpc {

absl::StatusOr<v1::Optimizer> Preview(const optimizer::OptimizerTable& table, const transport::Peer& peer,
                                      const v1::CreateOptimizerRequest& request, const engine::OptimizerSpec& spec) {
  const absl::StatusOr<optimizer::OptimizerTable::Preview> preview = table.Plan(peer, request.name(), spec);
  if (!preview.ok()) return preview.status();
  v1::Optimizer proto;
  proto.set_name(request.name());
  proto.set_uid(peer.uid);
  proto.set_algorithm(std::string(spec.algorithm->name));
  proto.set_element_count(engine::ElementCount(spec));
  proto.set_parameter_count(static_cast<uint32_t>(spec.parameters.size()));
  proto.set_bucket_count(static_cast<uint32_t>(preview->layout.buckets.size()));
  SetMemoryUse(preview->use, &proto);
  proto.set_state_reason(std::string(preview->room.message()));
  return proto;
}

void SetMemoryUse(const memory::MemoryUse& use, v1::Optimizer* proto) {
  proto->set_memory_bytes(use.total_bytes());
  v1::MemoryUse* const out = proto->mutable_memory();
  out->set_state_bytes(use.state_bytes);
  out->set_gradients_bytes(use.gradients_bytes);
  out->set_parameters_bytes(use.parameters_bytes);
  out->set_metadata_bytes(use.metadata_bytes);
}

}  // namespace superoffload::rpc
