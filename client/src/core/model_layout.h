// Where the daemon has put a model: its parameters, its buckets, and which elements of the ones the others hold.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CORE_MODEL_LAYOUT_H_
#define SUPEROFFLOAD_CLIENT_SRC_CORE_MODEL_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/src/status.h"
#include "kernels/elements/elements.h"
#include "superoffload/superoffload.h"

namespace superoffload::client {

// From the numbers of DataType of optimizer.proto. False: it is none of them.
bool ToDType(uint32_t number, kernels::DType* dtype);
// "bfloat16".
const char* DTypeName(kernels::DType dtype);

// One parameter, in the order of creation: Placement of optimizer.proto, checked. Offsets in bytes but for the state's.
struct ParameterPlace {
  std::string name;
  uint64_t elements = 0;
  uint64_t parameters_offset = 0;  // into the host's parameters
  uint64_t gpu_offset = 0;         // into the GPU's
  uint64_t gradient_offsets[2] = {};
  uint64_t state_offset = 0;  // elements
  uint32_t first_bucket = 0, bucket_count = 0;
  kernels::DType dtype{}, gradient_dtype{};

  uint64_t bytes() const { return elements * kernels::DTypeBytes(dtype); }
};

// Elements [first, first + elements) of a parameter, which are those of a bucket from `place` on.
struct BucketPart {
  uint32_t parameter = 0;
  uint64_t first = 0;
  uint64_t place = 0;
  uint64_t elements = 0;
};

class ModelLayout {
 public:
  ModelLayout() = default;

  // INVALID_ARGUMENT: what no attach response says.
  static Status Create(const superoffload_trainer_options& options, ModelLayout* layout);

  size_t parameter_count() const { return parameters_.size(); }
  const ParameterPlace& parameter(size_t index) const { return parameters_[index]; }
  // INVALID_ARGUMENT: there is no such parameter.
  Status CheckParameter(uint32_t parameter) const;

  uint32_t group_count() const { return group_count_; }
  uint32_t scalar_count() const { return scalar_count_; }  // of each group

  size_t bucket_count() const { return buckets_.size(); }
  // As it was given, which nobody has checked.
  const superoffload_bucket& bucket(size_t index) const { return buckets_[index].given; }
  bool has_one_slot() const { return has_one_slot_; }  // some buckets' slots are the same memory
  // Of parameters, without what lies between them.
  uint64_t elements(uint32_t bucket) const { return buckets_[bucket].elements; }
  // What a bucket holds, ascending.
  std::span<const BucketPart> parts(uint32_t bucket) const { return buckets_[bucket].parts; }
  // The most bytes that the gradients of a bucket take.
  uint64_t most_gradient_bytes() const { return most_gradient_bytes_; }

  // Calls `use(bucket, part)` for each bucket that has some of elements [first, first + elements) of a parameter.
  template <typename Use>
  void ForEachPart(uint32_t parameter, uint64_t first, uint64_t elements, Use use) const {
    const ParameterPlace& place = parameters_[parameter];
    const uint64_t begin = place.state_offset + first, end = begin + elements;
    for (uint32_t bucket = place.first_bucket; bucket < place.first_bucket + place.bucket_count; ++bucket) {
      const Bucket& there = buckets_[bucket];
      const uint64_t low = std::max(begin, there.begin), high = std::min(end, there.end);
      if (low < high) use(bucket, BucketPart{parameter, low - place.state_offset, low - there.begin, high - low});
    }
  }

 private:
  struct Bucket {
    superoffload_bucket given;
    uint64_t begin = 0, end = 0;  // of the state
    uint64_t elements = 0;
    std::vector<BucketPart> parts;
  };

  Status Add(const superoffload_parameter& given);

  std::vector<ParameterPlace> parameters_;
  std::vector<Bucket> buckets_;
  uint64_t most_gradient_bytes_ = 0;
  bool has_one_slot_ = false;
  uint32_t group_count_ = 0, scalar_count_ = 0;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_CORE_MODEL_LAYOUT_H_
