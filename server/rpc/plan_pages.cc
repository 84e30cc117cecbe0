#include "server/rpc/plan_pages.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/rpc/to_proto.h"

namespace superoffload::rpc {
namespace {

// How many entries the pages before have.
struct Position {
  size_t groups = 0;
  size_t parameters = 0;
  size_t buckets = 0;
  bool with_steps = false;  // all pages have parameter steps, or none
};

std::string PageToken(const optimizer::HostedOptimizer& optimizer, const Position& position) {
  return absl::StrCat(optimizer.unique_id(), "/", position.groups, "/", position.parameters, "/", position.buckets, "/",
                      position.with_steps ? 1 : 0);
}

absl::StatusOr<Position> FromPageToken(const optimizer::HostedOptimizer& optimizer, const std::string& token) {
  const std::vector<std::string> fields = absl::StrSplit(token, '/');
  Position position;
  uint64_t numbers[4];
  bool valid = fields.size() == 5 && fields[0] == optimizer.unique_id();
  for (size_t i = 0; valid && i < 4; ++i) valid = absl::SimpleAtoi(fields[i + 1], &numbers[i]);
  if (valid) position = {numbers[0], numbers[1], numbers[2], numbers[3] != 0};
  if (valid && position.groups <= optimizer.spec().groups.size() &&
      position.parameters <= optimizer.spec().parameters.size() &&
      position.buckets <= optimizer.layout().buckets.size()) {
    return position;
  }
  return absl::InvalidArgumentError(absl::StrCat("page_token is not that of a page of optimizer \"",
                                                 optimizer.id().name,
                                                 "\"; it may have been deleted and created anew: leave the token out"));
}

void SetGroup(const kernels::Algorithm& algorithm, const engine::Scalars& group, v1::ParameterGroup* out) {
  for (size_t i = 0; i < group.size(); ++i) {
    v1::Scalar* const scalar = out->add_scalars();
    scalar->set_name(std::string(algorithm.scalars[i].name));
    scalar->set_value(group[i]);
  }
}

void SetParameter(const engine::ParameterSpec& parameter, v1::Parameter* out) {
  out->set_name(parameter.name);
  for (uint64_t extent : parameter.shape) out->add_shape(extent);
  out->set_dtype(ToProto(parameter.dtype));
  out->set_gradient_dtype(ToProto(parameter.gradient_dtype));
  out->set_group(parameter.group);
  out->set_unit(parameter.unit);
  out->mutable_global_shape()->Assign(parameter.global_shape.begin(), parameter.global_shape.end());
  out->mutable_global_offset()->Assign(parameter.global_offset.begin(), parameter.global_offset.end());
  out->set_state_in_float32(parameter.in_fp32);
}

void SetPlacement(const engine::Placement& placement, v1::Placement* out) {
  out->set_parameters_offset(placement.parameters_offset);
  for (uint64_t offset : placement.gradient_offsets) out->add_gradient_offsets(offset);
  out->set_state_offset(placement.state_offset);
  out->set_first_bucket(placement.first_bucket);
  out->set_bucket_count(placement.bucket_count);
  out->set_format(placement.format);
}

void SetBucket(const engine::BucketLayout& bucket, v1::Bucket* out) {
  out->set_group(bucket.group);
  out->set_dtype(ToProto(bucket.dtype));
  out->set_gradient_dtype(ToProto(bucket.gradient_dtype));
  out->set_elements(bucket.elements);
  out->set_parameters_offset(bucket.parameters_offset);
  for (uint64_t offset : bucket.gradient_offsets) out->add_gradient_offsets(offset);
  out->set_state_offset(bucket.state_offset);
  out->set_format(bucket.format);
  out->set_log_slots(bucket.log_slots);
  out->set_log_offset(bucket.log_offset);
}

void SetCodes(const kernels::Algorithm& algorithm, const kernels::BlockCodec& codec, v1::StateArray* out) {
  std::array<uint8_t, 256> codes{};
  std::iota(codes.begin(), codes.end(), uint8_t{0});
  std::array<float, codes.size()> values{};
  const float scale = 1;
  codec.decode(codes.size(), codes.data(), &scale, values.data());
  out->mutable_codes()->Add(values.begin(), values.end());
  out->set_scales(std::string(algorithm.arrays[codec.scales].name));
}

// What of the layout is no list of the model's parts.
void SetSizes(const engine::Layout& layout, v1::Layout* out) {
  out->set_parameters_bytes(layout.parameters_bytes);
  out->set_gradients_bytes(layout.gradients_bytes);
  out->set_state_bytes(layout.state_bytes);
  out->set_state_elements(layout.state_elements());
  out->set_in_place(layout.in_place);
  for (uint32_t format = 0; format < layout.formats.size(); ++format) {
    for (const engine::ArrayLayout& laid_out : layout.formats[format].arrays) {
      v1::StateArray* const proto = out->add_arrays();
      proto->set_format(format);
      proto->set_name(std::string(laid_out.array.name));
      proto->set_dtype(ToProto(laid_out.array.dtype));
      proto->set_offset(laid_out.offset);
      proto->set_elements_per_entry(laid_out.array.elements_per_entry);
      if (laid_out.array.codec != nullptr) SetCodes(*layout.formats[format].algorithm, *laid_out.array.codec, proto);
    }
  }
}

// Whether some parameter had no gradient in some step.
bool Differ(const std::vector<uint64_t>& steps, uint64_t committed_steps) {
  return std::any_of(steps.begin(), steps.end(), [&](uint64_t of_one) { return of_one != committed_steps; });
}

}  // namespace

absl::Status AddPlanPage(const optimizer::HostedOptimizer& optimizer, const std::string& page_token, size_t page_bytes,
                         v1::Optimizer* page) {
  const engine::OptimizerSpec& spec = optimizer.spec();
  const engine::Layout& layout = optimizer.layout();
  absl::StatusOr<Position> at = page_token.empty() ? Position() : FromPageToken(optimizer, page_token);
  if (!at.ok()) return at.status();
  std::vector<uint64_t> steps;
  if (page_token.empty()) {
    SetSizes(layout, page->mutable_layout());
    steps = optimizer.engine().parameter_steps();
    at->with_steps = Differ(steps, page->committed_steps());
  } else if (at->with_steps) {
    steps = optimizer.engine().parameter_steps();
  }
  size_t bytes = 0;
  const auto room = [&] { return bytes < page_bytes; };
  if (at->groups < spec.groups.size()) {
    const std::vector<engine::Scalars> groups = optimizer.engine().groups();
    for (; at->groups < groups.size() && room(); ++at->groups) {
      v1::ParameterGroup* const group = page->add_groups();
      SetGroup(*spec.algorithm, groups[at->groups], group);
      bytes += group->ByteSizeLong();
    }
  }
  for (; at->parameters < spec.parameters.size() && room(); ++at->parameters) {
    v1::Parameter* const parameter = page->add_parameters();
    SetParameter(spec.parameters[at->parameters], parameter);
    v1::Placement* const placement = page->mutable_layout()->add_placements();
    SetPlacement(layout.placements[at->parameters], placement);
    if (at->with_steps) page->add_parameter_steps(steps[at->parameters]);
    bytes += parameter->ByteSizeLong() + placement->ByteSizeLong();
  }
  for (; at->buckets < layout.buckets.size() && room(); ++at->buckets) {
    v1::Bucket* const bucket = page->mutable_layout()->add_buckets();
    SetBucket(layout.buckets[at->buckets], bucket);
    bytes += bucket->ByteSizeLong();
  }
  if (at->groups < spec.groups.size() || at->parameters < spec.parameters.size() ||
      at->buckets < layout.buckets.size()) {
    page->set_next_page_token(PageToken(optimizer, *at));
  }
  return absl::OkStatus();
}

}  // namespace superoffload::rpc
