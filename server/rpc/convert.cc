#include "server/rpc/convert.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "superoffload/v1/printable.h"

namespace superoffload::rpc {
namespace {

using kernels::DType;
using kernels::WeightDecay;

absl::Status Unknown(const std::string& field, int value) {
  return absl::InvalidArgumentError(absl::StrCat(field, " has the unknown value ", value, "; see optimizer.proto"));
}

absl::StatusOr<DType> ToDType(v1::DataType type, const std::string& field) {
  switch (type) {
    case v1::DATA_TYPE_BFLOAT16:
      return DType::kBFloat16;
    case v1::DATA_TYPE_FLOAT16:
      return DType::kFloat16;
    case v1::DATA_TYPE_FLOAT32:
      return DType::kFloat32;
    case v1::DATA_TYPE_UNSPECIFIED:
      return absl::InvalidArgumentError(absl::StrCat(field, " is missing; give bfloat16, float16 or float32"));
    default:
      return Unknown(field, type);
  }
}

v1::DataType ToProto(DType type) {
  switch (type) {
    case DType::kBFloat16:
      return v1::DATA_TYPE_BFLOAT16;
    case DType::kFloat16:
      return v1::DATA_TYPE_FLOAT16;
    case DType::kFloat32:
      return v1::DATA_TYPE_FLOAT32;
  }
  return v1::DATA_TYPE_UNSPECIFIED;
}

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

absl::StatusOr<engine::ParameterSpec> ToParameter(const v1::Parameter& proto, int index) {
  const std::string field = absl::StrCat("parameters[", index, "]");
  engine::ParameterSpec parameter;
  parameter.name = proto.name();
  parameter.shape.assign(proto.shape().begin(), proto.shape().end());
  parameter.group = proto.group();
  absl::StatusOr<DType> dtype = ToDType(proto.dtype(), field + ".dtype");
  if (!dtype.ok()) return dtype.status();
  parameter.dtype = parameter.gradient_dtype = *dtype;
  if (proto.gradient_dtype() != v1::DATA_TYPE_UNSPECIFIED) {
    absl::StatusOr<DType> gradient_dtype = ToDType(proto.gradient_dtype(), field + ".gradient_dtype");
    if (!gradient_dtype.ok()) return gradient_dtype.status();
    parameter.gradient_dtype = *gradient_dtype;
  }
  return parameter;
}

void SetLayout(const engine::Layout& layout, v1::Layout* proto) {
  for (const engine::BucketLayout& bucket : layout.buckets) {
    v1::Bucket* out = proto->add_buckets();
    out->set_group(bucket.group);
    out->set_dtype(ToProto(bucket.dtype));
    out->set_gradient_dtype(ToProto(bucket.gradient_dtype));
    out->set_elements(bucket.elements);
    out->set_parameters_offset(bucket.parameters_offset);
    for (uint64_t offset : bucket.gradient_offsets) out->add_gradient_offsets(offset);
    out->set_state_offset(bucket.state_offset);
  }
  for (const engine::Placement& placement : layout.placements) {
    v1::Placement* out = proto->add_placements();
    out->set_parameters_offset(placement.parameters_offset);
    for (uint64_t offset : placement.gradient_offsets) out->add_gradient_offsets(offset);
    out->set_state_offset(placement.state_offset);
    out->set_first_bucket(placement.first_bucket);
    out->set_bucket_count(placement.bucket_count);
  }
  proto->set_parameters_bytes(layout.parameters_bytes);
  proto->set_gradients_bytes(layout.gradients_bytes);
  proto->set_state_bytes(layout.state_bytes);
  proto->set_state_elements(layout.state_elements);
  proto->set_master_offset(layout.state_array_offsets[0]);
  proto->set_exp_avg_offset(layout.state_array_offsets[1]);
  proto->set_exp_avg_sq_offset(layout.state_array_offsets[2]);
}

void SetParameters(const engine::OptimizerSpec& spec, v1::Optimizer* proto) {
  for (const engine::ParameterSpec& parameter : spec.parameters) {
    v1::Parameter* out = proto->add_parameters();
    out->set_name(parameter.name);
    for (uint64_t extent : parameter.shape) out->add_shape(extent);
    out->set_dtype(ToProto(parameter.dtype));
    out->set_gradient_dtype(ToProto(parameter.gradient_dtype));
    out->set_group(parameter.group);
  }
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

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()), Printable(std::string(status.message())));
}

absl::StatusOr<engine::OptimizerSpec> ToSpec(const v1::CreateOptimizerRequest& request) {
  WeightDecay decay_form;
  switch (request.algorithm()) {
    case v1::ALGORITHM_UNSPECIFIED:
    case v1::ALGORITHM_ADAMW:
      decay_form = WeightDecay::kDecoupled;
      break;
    case v1::ALGORITHM_ADAM:
      decay_form = WeightDecay::kL2;
      break;
    default:
      return Unknown("algorithm", request.algorithm());
  }
  engine::OptimizerSpec spec;
  spec.bucket_bytes = request.bucket_bytes();
  for (const v1::ParameterGroup& group : request.groups()) {
    spec.groups.push_back({.lr = group.lr(),
                           .beta1 = group.beta1(),
                           .beta2 = group.beta2(),
                           .eps = group.eps(),
                           .weight_decay = group.weight_decay(),
                           .decay_form = decay_form});
  }
  for (int i = 0; i < request.parameters_size(); ++i) {
    absl::StatusOr<engine::ParameterSpec> parameter = ToParameter(request.parameters(i), i);
    if (!parameter.ok()) return parameter.status();
    spec.parameters.push_back(*std::move(parameter));
  }
  return spec;
}

absl::StatusOr<engine::SpeculationPolicy> ToSpeculation(const v1::Policies& policies) {
  switch (policies.speculation()) {
    case v1::SPECULATION_ALWAYS:
      return engine::SpeculationPolicy::kAlways;
    case v1::SPECULATION_NEVER:
      return engine::SpeculationPolicy::kNever;
    case v1::SPECULATION_UNSPECIFIED:
    case v1::SPECULATION_ADAPTIVE:
      return engine::SpeculationPolicy::kAdaptive;
    default:
      return Unknown("policies.speculation", policies.speculation());
  }
}

absl::StatusOr<checkpoint::Schedule> ToSchedule(const v1::Policies& policies) {
  const v1::CheckpointSchedule& proto = policies.checkpoint();
  checkpoint::Schedule schedule{proto.every_steps(), proto.keep(), proto.directory()};
  if (absl::Status status = checkpoint::ValidateSchedule(schedule); !status.ok()) return status;
  return schedule;
}

absl::StatusOr<absl::Duration> ToLease(const v1::Policies& policies) {
  if (!policies.has_lease()) return absl::InfiniteDuration();
  const absl::Duration lease = absl::Seconds(policies.lease().seconds()) + absl::Nanoseconds(policies.lease().nanos());
  if (lease > absl::ZeroDuration()) return lease;
  return absl::InvalidArgumentError(absl::StrCat("policies.lease is ", absl::FormatDuration(lease),
                                                 " but must be positive; leave it out to keep the optimizer"));
}

absl::StatusOr<optimizer::Sync> ToSync(v1::Sync sync) {
  switch (sync) {
    case v1::SYNC_UNSPECIFIED:
    case v1::SYNC_CHECK:
      return optimizer::Sync::kCheck;
    case v1::SYNC_PULL:
      return optimizer::Sync::kPull;
    case v1::SYNC_PUSH:
      return optimizer::Sync::kPush;
    default:
      return Unknown("sync", sync);
  }
}

absl::StatusOr<optimizer::GpuUse> ToGpuUse(const v1::GpuUse& use) {
  constexpr size_t kMostBytes = 64 * 1024;
  if (use.ByteSizeLong() > kMostBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("use has ", use.ByteSizeLong(), " bytes; tell the daemon in at most ", kMostBytes));
  }
  optimizer::GpuUse result{.gpu = use.gpu(),
                           .mover = use.mover(),
                           .sharing = use.sharing(),
                           .coherent = use.coherent(),
                           .staged = use.staged(),
                           .mover_seconds = {use.mover_seconds().begin(), use.mover_seconds().end()},
                           .cast = use.cast(),
                           .cast_timings = {},
                           .resident_buckets = use.resident_buckets(),
                           .gpu_bytes = use.gpu_bytes(),
                           .notes = use.notes()};
  for (const v1::CastTiming& timing : use.cast_timings()) {
    result.cast_timings.push_back({timing.elements(), timing.fused_seconds(), timing.gpu_fp32_seconds()});
  }
  return result;
}

namespace {

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
  return proto;
}

}  // namespace

v1::Optimizer ToProto(const optimizer::HostedOptimizer& optimizer, const checkpoint::Schedule& schedule,
                      Details details) {
  v1::Optimizer proto;
  proto.set_name(optimizer.id().name);
  proto.set_uid(optimizer.id().uid);
  for (const kernels::AdamHyperparameters& group : optimizer.engine().groups()) {
    proto.set_algorithm(group.decay_form == WeightDecay::kL2 ? v1::ALGORITHM_ADAM : v1::ALGORITHM_ADAMW);
    if (details == Details::kListed) break;
    v1::ParameterGroup* out = proto.add_groups();
    out->set_lr(group.lr);
    out->set_beta1(group.beta1);
    out->set_beta2(group.beta2);
    out->set_eps(group.eps);
    out->set_weight_decay(group.weight_decay);
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
  const optimizer::AttachmentInfo attachment = optimizer.attachment();
  proto.set_attached(attachment.epoch != 0);
  proto.set_trainer_pid(attachment.peer.pid);
  if (attachment.gpu) *proto.mutable_gpu() = ToProto(*attachment.gpu);
  proto.set_memory_bytes(optimizer.memory_bytes());
  uint64_t elements = 0;
  for (const engine::ParameterSpec& parameter : optimizer.spec().parameters) elements += ElementCount(parameter);
  proto.set_element_count(elements);
  const absl::Status complete = optimizer.engine().CheckComplete();
  proto.set_state(complete.ok() ? v1::OPTIMIZER_STATE_READY : v1::OPTIMIZER_STATE_INCOMPLETE);
  proto.set_state_reason(std::string(complete.message()));
  proto.set_parameter_count(static_cast<uint32_t>(optimizer.spec().parameters.size()));
  proto.set_bucket_count(static_cast<uint32_t>(optimizer.layout().buckets.size()));
  if (details == Details::kFull) {
    SetParameters(optimizer.spec(), &proto);
    SetLayout(optimizer.layout(), proto.mutable_layout());
  }
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
  const transport::VerdictReport& verdict = step.report.verdict;
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
  SetDuration(step.report.receive_duration, proto.mutable_receive_duration());
  SetDuration(step.report.exposed_duration, proto.mutable_exposed_duration());
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
    for (const std::vector<int>& core : superchip.cores)
      out->add_cores()->mutable_cpus()->Assign(core.begin(), core.end());
    out->mutable_gpus()->Assign(superchip.gpus.begin(), superchip.gpus.end());
  }
  proto.mutable_nodes_without_cpus()->Assign(topology.nodes_without_cpus.begin(), topology.nodes_without_cpus.end());
  proto.set_page_bytes(topology.page_bytes);
  return proto;
}

}  // namespace superoffload::rpc
