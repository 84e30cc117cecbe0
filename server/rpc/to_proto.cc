#include "server/rpc/to_proto.h"

#include <string>

#include "absl/time/time.h"
#include "server/rpc/preview.h"
#include "superoffload/v1/printable.h"

namespace superoffload::rpc {
namespace {

using kernels::DType;

v1::Speculation ToProto(engine::SpeculationPolicy policy) {
  switch (policy) {
    case engine::SpeculationPolicy::kAlways:
      return v1::SPECULATION_ALWAYS;
    case engine::SpeculationPolicy::kNever:
      return v1::SPECULATION_NEVER;
    case engine::SpeculationPolicy::kAdaptive:
      return v1::SPECULATION_ADAPTIVE;
  }
  return v1::SPECULATION_UNSPECIFIED;
}

void SetTime(absl::Time time, google::protobuf::Timestamp* proto) {
  const int64_t nanos = absl::ToUnixNanos(time);
  proto->set_seconds(nanos / 1'000'000'000);
  proto->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
}

void SetDuration(absl::Duration duration, google::protobuf::Duration* proto) {
  const int64_t nanos = absl::ToInt64Nanoseconds(duration);
  proto->set_seconds(nanos / 1'000'000'000);
  proto->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
}

void SetStatistics(const engine::StepStatistics& statistics, v1::Optimizer* proto) {
  proto->set_step(statistics.step);
  proto->set_committed_steps(statistics.committed_steps);
  v1::StepStatistics* out = proto->mutable_statistics();
  out->set_commits(statistics.commits);
  out->set_clips(statistics.clips);
  out->set_skips_non_finite(statistics.skips_non_finite);
  out->set_skips_overflow(statistics.skips_overflow);
  out->set_skips_abandoned(statistics.skips_abandoned);
  out->set_speculated_buckets(statistics.speculated_buckets);
  out->set_republished_buckets(statistics.republished_buckets);
  out->set_consecutive_skips(statistics.consecutive_skips);
}

v1::GpuUse ToProto(const optimizer::GpuUse& use) {
  v1::GpuUse proto;
  proto.set_gpu(use.gpu);
  proto.set_mover(use.mover);
  proto.set_sharing(use.sharing);
  proto.set_coherent(use.coherent);
  proto.set_staged(use.staged);
  proto.mutable_mover_seconds()->insert(use.mover_seconds.begin(), use.mover_seconds.end());
  proto.set_cast(use.cast);
  for (const optimizer::GpuUse::CastTiming& timing : use.cast_timings) {
    v1::CastTiming* out = proto.add_cast_timings();
    out->set_elements(timing.elements);
    out->set_fused_seconds(timing.fused_seconds);
    out->set_gpu_fp32_seconds(timing.gpu_fp32_seconds);
  }
  proto.set_resident_buckets(use.resident_buckets);
  proto.set_gpu_bytes(use.gpu_bytes);
  proto.set_notes(use.notes);
  proto.set_streamed_units(use.streamed_units);
  proto.set_stream_slots(use.stream_slots);
  proto.set_streamed_bytes(use.streamed_bytes);
  return proto;
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()), Printable(std::string(status.message())));
}

v1::DataType ToProto(DType type) {
  switch (type) {
    case DType::kBFloat16:
      return v1::DATA_TYPE_BFLOAT16;
    case DType::kFloat16:
      return v1::DATA_TYPE_FLOAT16;
    case DType::kFloat32:
      return v1::DATA_TYPE_FLOAT32;
    case DType::kUInt8:
      return v1::DATA_TYPE_UINT8;
  }
  return v1::DATA_TYPE_UNSPECIFIED;
}

v1::RunTerms ToProto(const engine::Record::RunTerms& terms) {
  v1::RunTerms proto;
  proto.set_sum_of_squares(terms.sum_of_squares);
  proto.set_gradient_scale(terms.gradient_scale);
  proto.set_max_grad_norm(terms.max_grad_norm);
  return proto;
}

v1::PreparedStep ToProto(const engine::Record::Prepared& prepared) {
  v1::PreparedStep proto;
  proto.set_step(prepared.step);
  proto.set_attempt(prepared.attempt);
  *proto.mutable_terms() = ToProto(prepared.terms);
  return proto;
}

v1::RunReport ToProto(const engine::RunReport& report) {
  v1::RunReport proto;
  proto.set_lineage(report.lineage);
  proto.set_committed_steps(report.committed_steps);
  *proto.mutable_last() = ToProto(report.last);
  if (report.prepared) *proto.mutable_prepared() = ToProto(*report.prepared);
  return proto;
}

v1::Algorithm ToProto(const kernels::Algorithm& algorithm) {
  v1::Algorithm proto;
  proto.set_name(std::string(algorithm.name));
  for (const kernels::Scalar& scalar : algorithm.scalars) {
    v1::Algorithm::Scalar* const out = proto.add_scalars();
    out->set_name(std::string(scalar.name));
    out->set_default_value(scalar.default_value);
    out->set_least(scalar.least);
    out->set_below(scalar.below);
  }
  for (const kernels::StateArray& array : algorithm.arrays) {
    v1::Algorithm::Array* const out = proto.add_arrays();
    out->set_name(std::string(array.name));
    out->set_dtype(ToProto(array.dtype));
    out->set_elements_per_entry(array.elements_per_entry);
  }
  if (algorithm.in_fp32 != nullptr) proto.set_in_float32(std::string(algorithm.in_fp32->name));
  proto.set_rounds_stochastically(algorithm.rounds_stochastically());
  return proto;
}

v1::Optimizer ToProto(const optimizer::HostedOptimizer& optimizer, const checkpoint::Schedule& schedule) {
  v1::Optimizer proto;
  proto.set_name(optimizer.id().name);
  proto.set_uid(optimizer.id().uid);
  proto.set_id(optimizer.unique_id());
  const engine::OptimizerSpec& spec = optimizer.spec();
  proto.set_algorithm(std::string(spec.algorithm->name));
  if (spec.algorithm->rounds_stochastically()) proto.set_seed(optimizer.seed());
  if (!spec.member.run.empty()) {
    proto.mutable_member()->set_run(spec.member.run);
    proto.mutable_member()->set_rank(spec.member.rank);
    proto.mutable_member()->set_ranks(spec.member.ranks);
  }
  proto.mutable_policies()->set_speculation(ToProto(optimizer.engine().policy()));
  if (schedule.every_steps > 0) {
    v1::CheckpointSchedule* out = proto.mutable_policies()->mutable_checkpoint();
    out->set_every_steps(schedule.every_steps);
    out->set_keep(schedule.keep);
    out->set_directory(schedule.directory);
  }
  if (optimizer.lease() < absl::InfiniteDuration()) {
    SetDuration(optimizer.lease(), proto.mutable_policies()->mutable_lease());
  }
  SetTime(optimizer.create_time(), proto.mutable_create_time());
  SetStatistics(optimizer.engine().statistics(), &proto);
  const optimizer::AttachedTrainer attachment = optimizer.attachment();
  proto.set_attached(attachment.epoch != 0);
  proto.set_trainer_pid(attachment.peer.pid);
  if (attachment.gpu) *proto.mutable_gpu() = ToProto(*attachment.gpu);
  SetMemoryUse(optimizer.memory_use(), &proto);
  proto.set_element_count(ElementCount(spec));
  const absl::Status complete = optimizer.engine().CheckComplete();
  proto.set_state(complete.ok() ? v1::OPTIMIZER_STATE_READY : v1::OPTIMIZER_STATE_INCOMPLETE);
  proto.set_state_reason(std::string(complete.message()));
  if (const auto prepared = optimizer.engine().prepared()) *proto.mutable_prepared() = ToProto(*prepared);
  proto.set_parameter_count(static_cast<uint32_t>(optimizer.spec().parameters.size()));
  proto.set_bucket_count(static_cast<uint32_t>(optimizer.layout().buckets.size()));
  return proto;
}

v1::Optimizer ToProto(const optimizer::OptimizerTable::Damaged& damaged) {
  v1::Optimizer proto;
  proto.set_name(damaged.id.name);
  proto.set_uid(damaged.id.uid);
  proto.set_state(v1::OPTIMIZER_STATE_DAMAGED);
  proto.set_state_reason(std::string(damaged.reason.message()));
  proto.set_memory_bytes(damaged.memory_bytes);
  return proto;
}

v1::StepReport ToProto(const optimizer::WatchedStep& step) {
  const engine::VerdictReport& verdict = step.report.verdict;
  v1::StepReport proto;
  proto.set_optimizer(step.id.name);
  proto.set_step(verdict.step);
  proto.set_committed_steps(verdict.committed_steps);
  proto.set_verdict(static_cast<v1::Verdict>(verdict.verdict));
  proto.set_global_norm(verdict.global_norm);
  proto.set_clip_coefficient(verdict.clip_coefficient);
  proto.set_buckets(step.report.buckets);
  proto.set_speculated_buckets(verdict.speculated_buckets);
  proto.set_republished_buckets(verdict.republished_buckets);
  proto.set_streamed_bytes(step.report.streamed_bytes);
  if (!step.report.by_agreement) {
    SetDuration(step.report.receive_duration, proto.mutable_receive_duration());
    SetDuration(step.report.exposed_duration, proto.mutable_exposed_duration());
  }
  SetTime(step.report.end_time, proto.mutable_end_time());
  proto.set_dropped_reports(step.dropped_reports);
  return proto;
}

v1::Topology ToProto(const topology::Topology& topology) {
  v1::Topology proto;
  for (const topology::Superchip& superchip : topology.superchips) {
    v1::Superchip* const out = proto.add_superchips();
    out->set_memory_node(superchip.memory_node);
    out->set_memory_bytes(superchip.memory_bytes);
    for (const std::vector<int>& core : superchip.cores) {
      out->add_cores()->mutable_cpus()->Assign(core.begin(), core.end());
    }
    out->mutable_gpus()->Assign(superchip.gpus.begin(), superchip.gpus.end());
  }
  proto.mutable_nodes_without_cpus()->Assign(topology.nodes_without_cpus.begin(), topology.nodes_without_cpus.end());
  proto.set_page_bytes(topology.page_bytes);
  return proto;
}

}  // namespace superoffload::rpc
