#include "server/rpc/from_proto.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace superoffload::rpc {
namespace {

using kernels::DType;

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

absl::StatusOr<engine::ParameterSpec> ToParameter(const v1::Parameter& proto, int index) {
  const std::string field = absl::StrCat("parameters[", index, "]");
  engine::ParameterSpec parameter;
  parameter.name = proto.name();
  parameter.shape.assign(proto.shape().begin(), proto.shape().end());
  parameter.group = proto.group();
  parameter.unit = proto.unit();
  parameter.global_shape.assign(proto.global_shape().begin(), proto.global_shape().end());
  parameter.global_offset.assign(proto.global_offset().begin(), proto.global_offset().end());
  parameter.in_fp32 = proto.state_in_float32();
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

// Scalars that are left out have the algorithm's default.
absl::StatusOr<engine::Scalars> ToScalars(const kernels::Algorithm& algorithm, const v1::ParameterGroup& group,
                                          const std::string& field) {
  engine::Scalars scalars = algorithm.DefaultScalars();
  for (const v1::Scalar& given : group.scalars()) {
    size_t index = 0;
    while (index < scalars.size() && algorithm.scalars[index].name != given.name()) ++index;
    if (index == scalars.size()) {
      return absl::InvalidArgumentError(absl::StrCat(field, ".scalars: ", std::string(algorithm.name),
                                                     " has no hyper-parameter \"", given.name(),
                                                     "\"; GetServerInfo lists those it has"));
    }
    scalars[index] = given.value();
  }
  return scalars;
}

absl::StatusOr<const kernels::Algorithm*> ToAlgorithm(const std::string& name) {
  if (const kernels::Algorithm* algorithm = kernels::FindAlgorithm(name); algorithm != nullptr) return algorithm;
  std::string names;
  for (const kernels::Algorithm* known : kernels::Algorithms()) absl::StrAppend(&names, " ", std::string(known->name));
  return absl::InvalidArgumentError(absl::StrCat("algorithm is \"", name, "\"; this daemon has:", names));
}

}  // namespace

absl::StatusOr<engine::OptimizerSpec> ToSpec(const v1::CreateOptimizerRequest& request) {
  absl::StatusOr<const kernels::Algorithm*> algorithm = ToAlgorithm(request.algorithm());
  if (!algorithm.ok()) return algorithm.status();
  engine::OptimizerSpec spec;
  spec.algorithm = *algorithm;
  spec.bucket_bytes = request.bucket_bytes();
  spec.seed = request.seed();
  spec.logged_buckets = request.logged_buckets();
  spec.log_slots = request.log_slots();
  if (request.gradient_slots() != 0) spec.gradient_slots = request.gradient_slots();
  spec.in_place = request.in_place();
  if (request.has_member()) {
    spec.member = {request.member().run(), request.member().rank(), request.member().ranks()};
  }
  for (int i = 0; i < request.groups_size(); ++i) {
    absl::StatusOr<engine::Scalars> scalars =
        ToScalars(**algorithm, request.groups(i), absl::StrCat("groups[", i, "]"));
    if (!scalars.ok()) return scalars.status();
    spec.groups.push_back(*std::move(scalars));
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

checkpoint::RestoreSource ToRestoreSource(const v1::RestoreOptimizerRequest& request) {
  checkpoint::RestoreSource source{.directories = {request.directories().begin(), request.directories().end()},
                                   .files = {},
                                   .lineage = request.lineage()};
  for (const v1::TensorFile& file : request.files()) source.files.push_back({file.path(), file.committed_steps()});
  return source;
}

engine::Record::RunTerms ToTerms(const v1::RunTerms& terms) {
  return {terms.sum_of_squares(), terms.gradient_scale(), terms.max_grad_norm()};
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
                           .notes = use.notes(),
                           .streamed_units = use.streamed_units(),
                           .stream_slots = use.stream_slots(),
                           .streamed_bytes = use.streamed_bytes()};
  for (const v1::CastTiming& timing : use.cast_timings()) {
    result.cast_timings.push_back({timing.elements(), timing.fused_seconds(), timing.gpu_fp32_seconds()});
  }
  return result;
}

}  // namespace superoffload::rpc
