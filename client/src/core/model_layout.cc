#include "client/src/core/model_layout.h"

#include <iterator>
#include <utility>

namespace superoffload::client {

bool ToDType(uint32_t number, kernels::DType* dtype) {
  constexpr kernels::DType kByNumber[] = {kernels::DType::kBFloat16, kernels::DType::kFloat16,
                                          kernels::DType::kFloat32};
  if (number < 1 || number > std::size(kByNumber)) return false;
  *dtype = kByNumber[number - 1];
  return true;
}

const char* DTypeName(kernels::DType dtype) {
  constexpr const char* kNames[] = {"bfloat16", "float16", "float32"};
  return kNames[static_cast<size_t>(dtype)];
}

Status ModelLayout::Create(const superoffload_trainer_options& options, ModelLayout* layout) {
  if (options.parameters == nullptr || options.buckets == nullptr) {
    return Error(Code::kInvalidArgument, "NULL argument");
  }
  if (options.parameter_count == 0 || options.bucket_count == 0) {
    return Error(Code::kInvalidArgument, "there must be a parameter and a bucket");
  }
  ModelLayout created;
  created.group_count_ = options.group_count;
  created.scalar_count_ = options.scalar_count;
  for (uint32_t i = 0; i < options.bucket_count; ++i) {
    const superoffload_bucket& bucket = options.buckets[i];
    created.buckets_.push_back({bucket, bucket.state_offset, bucket.state_offset + bucket.elements, 0, {}});
    if (bucket.gradient_offsets[0] == bucket.gradient_offsets[1]) created.has_one_slot_ = true;
  }
  for (uint32_t i = 0; i < options.parameter_count; ++i) {
    if (Status status = created.Add(options.parameters[i]); !status.ok()) return status;
  }
  for (Bucket& bucket : created.buckets_) {
    std::ranges::sort(bucket.parts, {}, &BucketPart::place);
  }
  *layout = std::move(created);
  return {};
}

Status ModelLayout::CheckParameter(uint32_t parameter) const {
  if (parameter < parameters_.size()) return {};
  return Error(Code::kInvalidArgument, "parameter ", parameter, " does not exist; there are ", parameters_.size());
}

Status ModelLayout::Add(const superoffload_parameter& given) {
  const uint32_t index = static_cast<uint32_t>(parameters_.size());
  ParameterPlace place{.name = given.name == nullptr ? "" : given.name,
                       .elements = given.elements,
                       .parameters_offset = given.parameters_offset,
                       .gpu_offset = given.gpu_offset,
                       .gradient_offsets = {given.gradient_offsets[0], given.gradient_offsets[1]},
                       .state_offset = given.state_offset,
                       .first_bucket = given.first_bucket,
                       .bucket_count = given.bucket_count};
  const bool known = ToDType(given.dtype, &place.dtype) && ToDType(given.gradient_dtype, &place.gradient_dtype);
  if (!known || given.name == nullptr || uint64_t{given.first_bucket} + given.bucket_count > buckets_.size()) {
    return Error(Code::kInvalidArgument, "parameter ", index, " has no name, an unknown dtype or unknown buckets");
  }
  parameters_.push_back(std::move(place));
  uint64_t placed = 0;
  ForEachPart(index, 0, given.elements, [&](uint32_t bucket, const BucketPart& part) {
    buckets_[bucket].parts.push_back(part);
    buckets_[bucket].elements += part.elements;
    placed += part.elements;
    most_gradient_bytes_ = std::max(most_gradient_bytes_, (buckets_[bucket].end - buckets_[bucket].begin) *
                                                              kernels::DTypeBytes(parameters_.back().gradient_dtype));
  });
  if (placed == given.elements) return {};
  return Error(Code::kInvalidArgument, given.name, " has ", given.elements, " elements, but its buckets hold ", placed,
               " of them");
}

}  // namespace superoffload::client
