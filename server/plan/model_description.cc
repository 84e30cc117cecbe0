#include "server/plan/model_description.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/from_proto.h"
#include "server/simulator/catalogue.h"
#include "server/simulator/model_layout.h"

namespace superoffload::plan {
namespace {

simulator::Architecture ToArchitecture(const v1::Architecture& proto) {
  return {.layers = proto.layers(),
          .hidden = proto.hidden(),
          .query_heads = proto.query_heads(),
          .key_value_heads = proto.key_value_heads(),
          .head_dimension = proto.head_dimension(),
          .value_head_dimension = proto.value_head_dimension(),
          .query_latent = proto.query_latent(),
          .key_value_latent = proto.key_value_latent(),
          .feed_forward = proto.feed_forward(),
          .vocabulary = proto.vocabulary(),
          .experts = proto.experts(),
          .experts_per_token = proto.experts_per_token(),
          .shared_experts = proto.shared_experts(),
          .window = proto.window(),
          .windowed_layers = proto.windowed_layers(),
          .learned_positions = proto.learned_positions(),
          .gated_feed_forward = proto.gated_feed_forward(),
          .tied_embeddings = proto.tied_embeddings(),
          .biases = proto.biases(),
          .attention_biases = proto.attention_biases(),
          .output_bias = proto.output_bias(),
          .query_key_norms = proto.query_key_norms(),
          .fused_projections = proto.fused_projections(),
          .expert_biases = proto.expert_biases(),
          .attention_sinks = proto.attention_sinks()};
}

v1::DataType Or(v1::DataType type, v1::DataType otherwise) {
  return type == v1::DATA_TYPE_UNSPECIFIED ? otherwise : type;
}

// What CreateOptimizer would get: the daemon's own checks and defaults apply.
absl::StatusOr<engine::OptimizerSpec> ToSpec(const v1::PlanRequest& request, uint32_t groups,
                                             const google::protobuf::RepeatedPtrField<v1::Parameter>& parameters) {
  v1::CreateOptimizerRequest create;
  create.set_algorithm(request.algorithm().empty() ? std::string(kernels::Algorithms().front()->name)
                                                   : request.algorithm());
  for (uint32_t i = 0; i < groups; ++i) create.add_groups();
  create.set_bucket_bytes(request.bucket_bytes());
  *create.mutable_parameters() = parameters;
  return rpc::ToSpec(create);
}

// The parameters' dtypes, by way of one parameter.
absl::StatusOr<engine::OptimizerSpec> SpecWithDTypes(const v1::PlanRequest& request) {
  google::protobuf::RepeatedPtrField<v1::Parameter> parameters;
  v1::Parameter* const parameter = parameters.Add();
  parameter->set_name("any");
  parameter->set_dtype(Or(request.dtype(), v1::DATA_TYPE_BFLOAT16));
  parameter->set_gradient_dtype(request.gradient_dtype());
  return ToSpec(request, 1, parameters);
}

absl::Status CheckUnits(const simulator::Model& model) {
  for (const engine::ParameterSpec& parameter : model.parameters) {
    if (parameter.unit > model.architecture.head_unit()) {
      return absl::InvalidArgumentError(absl::StrCat("parameter \"", parameter.name, "\" is of unit ", parameter.unit,
                                                     " but the model has ", model.architecture.layers,
                                                     " blocks: units go up to ", model.architecture.head_unit()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<DescribedModel> FromParameters(const v1::PlanRequest& request, simulator::Architecture architecture) {
  const v1::ModelDescription& described = request.model();
  uint32_t groups = 1;
  for (const v1::Parameter& parameter : described.parameters()) groups = std::max(groups, parameter.group() + 1);
  if (groups > engine::kMaxGroups) {
    return absl::InvalidArgumentError(
        absl::StrCat("a parameter is of group ", groups - 1, " but there are at most ", engine::kMaxGroups, " groups"));
  }
  absl::StatusOr<engine::OptimizerSpec> spec = ToSpec(request, groups, described.parameters());
  if (!spec.ok()) return spec.status();
  DescribedModel model{{described.name(), architecture, spec->parameters}, *std::move(spec)};
  if (absl::Status status = CheckUnits(model.model); !status.ok()) return status;
  return model;
}

}  // namespace

absl::StatusOr<DescribedModel> ToModel(const v1::PlanRequest& request) {
  if (request.has_model() == !request.model_name().empty()) {
    return absl::InvalidArgumentError("give either the name of a model or its description");
  }
  simulator::Architecture architecture = ToArchitecture(request.model().architecture());
  if (request.has_model()) {
    if (absl::Status status = simulator::Complete(architecture); !status.ok()) return status;
    if (!request.model().parameters().empty()) return FromParameters(request, architecture);
    if (absl::Status status = simulator::CheckCanBeMade(architecture); !status.ok()) return status;
  }
  absl::StatusOr<engine::OptimizerSpec> spec = SpecWithDTypes(request);
  if (!spec.ok()) return spec.status();
  const kernels::DType dtype = spec->parameters[0].dtype, gradient_dtype = spec->parameters[0].gradient_dtype;
  simulator::Model model{request.model().name(), architecture, {}};
  if (request.has_model()) {
    model.parameters = simulator::MakeParameters(architecture, dtype, gradient_dtype);
  } else {
    absl::StatusOr<simulator::Model> known = simulator::FindModel(request.model_name(), dtype, gradient_dtype);
    if (!known.ok()) return known.status();
    model = *std::move(known);
  }
  simulator::KeepSomeInFp32(*spec->algorithm, model.parameters);
  spec->parameters = model.parameters;
  return DescribedModel{std::move(model), *std::move(spec)};
}

}  // namespace superoffload::plan
