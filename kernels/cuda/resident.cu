// The optimizer of resident buckets, whose state stays in the GPU's memory: one kernel per formula and way to store
// state. Algorithms name theirs (Algorithm::resident_kernel).
#include <type_traits>

#include "kernels/adam/adam_element.h"
#include "kernels/codes/dynamic_code.h"
#include "kernels/cuda/kernels.cuh"
#include "kernels/lion/lion_element.h"
#include "kernels/stored_state.h"

#define SUPEROFFLOAD_FOR_EACH_RESIDENT_KERNEL(X)                                                                  \
  X(superoffload_resident_adam, UpdateElements<AdamElement, Format{}>)                                            \
  X(superoffload_resident_adam_bf16, UpdateElements<AdamElement, formats::kBFloat16>)                             \
  X(superoffload_resident_adam_bf16_nearest, UpdateElements<AdamElement, formats::kBFloat16Nearest>)              \
  X(superoffload_resident_adam_8bit, UpdateBlocks<AdamElement, Masters::kFloat32, true, false>)                   \
  X(superoffload_resident_adam_masters16, UpdateElements<AdamElement, formats::kMasters16>)                       \
  X(superoffload_resident_adam_bf16_masters16, UpdateElements<AdamElement, formats::kBFloat16Masters16>)          \
  X(superoffload_resident_adam_8bit_masters16, UpdateBlocks<AdamElement, Masters::kRoundedBFloat16, true, false>) \
  X(superoffload_resident_lion, UpdateElements<LionElement, Format{}>)                                            \
  X(superoffload_resident_lion_bf16, UpdateElements<LionElement, formats::kBFloat16>)                             \
  X(superoffload_resident_lion_bf16_nearest, UpdateElements<LionElement, formats::kBFloat16Nearest>)              \
  X(superoffload_resident_lion_8bit, UpdateBlocks<LionElement, Masters::kFloat32, true>)                          \
  X(superoffload_resident_lion_masters16, UpdateElements<LionElement, formats::kMasters16>)                       \
  X(superoffload_resident_lion_bf16_masters16, UpdateElements<LionElement, formats::kBFloat16Masters16>)          \
  X(superoffload_resident_lion_8bit_masters16, UpdateBlocks<LionElement, Masters::kRoundedBFloat16, true>)

namespace superoffload::kernels {
inline namespace residents {  // named, as in pack.cu

// Threads of a warp: on the host each is alone.
#ifdef __CUDACC__
inline constexpr unsigned kLanes = 32;
#else
inline constexpr unsigned kLanes = 1;
#endif

// Between a thread's elements: as far as between those that share a block of random words (rounding.h).
inline constexpr unsigned kApart = kRoundingGroup / kResidentEach;

// Calls `body` with a constant for the dtype: in its loops nothing is decided per element.
template <class Body>
__device__ void ForDType(DType dtype, Body body) {
  switch (dtype) {
    case DType::kBFloat16:
      return body(std::integral_constant<DType, DType::kBFloat16>());
    case DType::kFloat16:
      return body(std::integral_constant<DType, DType::kFloat16>());
    case DType::kFloat32:
    case DType::kUInt8:
      return body(std::integral_constant<DType, DType::kFloat32>());
  }
}

// A thread's kEach elements, kStride from each other: all loads are under way together.
template <unsigned kEach, unsigned kStride>
struct Strided {
  uint64_t first, elements;  // of the range

  template <class Body>
  __device__ void Each(Body body) const {
    SUPEROFFLOAD_UNROLL
    for (unsigned e = 0; e < kEach; ++e) {
      if (const uint64_t i = first + e * kStride; i < elements) body(e, i);
    }
  }
  __device__ void Load(ConstElements from, float (&values)[kEach]) const {
    ForDType(from.dtype, [&](auto dtype) {
      Each([&](unsigned e, uint64_t i) { values[e] = LoadElement({from.data, dtype()}, i); });
    });
  }
  template <unsigned kArrays>
  __device__ void StoreFirst(MutableElements to, const float (&element)[kEach][kArrays]) const {
    ForDType(to.dtype, [&](auto dtype) {
      Each([&](unsigned e, uint64_t i) { StoreElement({to.data, dtype()}, i, element[e][0]); });
    });
  }
};

// The random words of a pair, of a thread's elements.
struct RoundingWords {
  uint32_t words[kResidentEach] = {};
};

// Of those elements from `group` on, a multiple of kRoundingGroup, that are kApart from each other.
__device__ RoundingWords WordsOf(const ResidentArguments& a, uint32_t step, uint32_t pair, uint64_t group,
                                 unsigned offset) {
  static_assert(kResidentEach == sizeof(PhiloxBlock) / sizeof(uint32_t));
  RoundingWords drawn;
  const PhiloxKey key = a.state.rounding.key;
  const auto place = a.box.Find(a.state.rounding.first + group);
  if (place.element % kRoundingGroup == 0 && place.count >= kRoundingGroup) {
    PhiloxBlock counter = RoundingCounter(step, place.element / kRoundingGroup, pair);
    counter.words[0] += offset;
    const PhiloxBlock block = Philox(key, counter);
    SUPEROFFLOAD_UNROLL
    for (unsigned e = 0; e < kResidentEach; ++e) drawn.words[e] = block.words[e];
    return drawn;
  }
  SUPEROFFLOAD_UNROLL
  for (unsigned e = 0; e < kResidentEach; ++e) {
    const uint64_t element = a.box.Find(a.state.rounding.first + group + offset + e * kApart).element;
    drawn.words[e] = RoundingWord(key, step, element, pair);
  }
  return drawn;
}

// A thread's elements are loaded together, and Philox is asked for them once.
template <class F, Format kFormat>
__device__ void UpdateElements(const ResidentArguments& a) {
  using Stored = StoredState<F, kFormat>;
  const auto step = a.constants.As<typename F::Step>();
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t t = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;; t += stride) {
    const uint64_t group = t / kApart * kRoundingGroup, first = group + t % kApart;
    if (group >= a.elements) return;
    const Strided<kResidentEach, kApart> own{first, a.elements};
    float element[kResidentEach][F::kArrays], gradient[kResidentEach];
    own.Each([&](unsigned e, uint64_t i) { Stored::Load(a.state, i, element[e]); });
    own.Load(a.gradient, gradient);
    RoundingWords of_masters, of_moments;
    const auto offset = static_cast<unsigned>(t % kApart);
    if constexpr (Stored::kRoundsMasters) of_masters = WordsOf(a, step.step, RoundingPair(0), group, offset);
    if constexpr (Stored::kRoundsMoments) of_moments = WordsOf(a, step.step, RoundingPair(1), group, offset);
    own.Each([&](unsigned e, uint64_t i) {
      F::Update(step, gradient[e], element[e]);
      const RoundingPairs pairs = {{of_masters.words[e], of_moments.words[e]}};
      Stored::Store(a.state, i, pairs, element[e]);
      element[e][0] = Stored::Master(element[e][0], pairs);
    });
    own.StoreFirst(a.theta, element);
  }
}

__device__ float Decode(bool is_signed, uint8_t code, float scale) {
  return is_signed ? DynamicCode<true>::Decode(code, scale) : DynamicCode<false>::Decode(code, scale);
}

__device__ uint8_t Encode(bool is_signed, float value, float inverse) {
  return is_signed ? DynamicCode<true>::Encode(value, inverse) : DynamicCode<false>::Encode(value, inverse);
}

// The largest of what the threads of a warp have, none of which is a NaN.
__device__ float LargestOfWarp(float value) {
#ifdef __CUDACC__
  for (unsigned apart = kLanes / 2; apart > 0; apart /= 2) {
    const float other = __shfl_xor_sync(~0u, value, apart);
    if (other > value) value = other;
  }
#endif
  return value;
}

// Draws words one by one; those of a block of Philox that are asked for one behind the other at once.
class WordDrawer {
 public:
  __device__ WordDrawer(const ResidentArguments& a, uint32_t step, uint32_t pair) : a_(a), step_(step), pair_(pair) {}

  __device__ uint32_t Draw(uint64_t i) {
    const uint64_t element = a_.box.Find(a_.state.rounding.first + i).element;
    const uint64_t group = element / kRoundingGroup;
    const auto in_group = static_cast<uint32_t>(element % kRoundingGroup), in_counters = in_group % kCounters;
    if (const uint64_t block = group * kCounters + in_counters; block != block_) {
      PhiloxBlock counter = RoundingCounter(step_, group, pair_);
      counter.words[0] += in_counters;
      drawn_ = Philox(a_.state.rounding.key, counter);
      block_ = block;
    }
    return drawn_.words[in_group / kCounters];
  }

 private:
  static constexpr uint32_t kCounters = kRoundingGroup / 4;

  const ResidentArguments& a_;
  const uint32_t step_, pair_;
  uint64_t block_ = ~uint64_t{0};
  PhiloxBlock drawn_ = {};
};

// A warp takes a block of codes at a time. kSigned: of each moment, whether its codes have signs.
template <class F, Masters kMasters, bool... kSigned>
__device__ void UpdateBlocks(const ResidentArguments& a) {
  constexpr unsigned kMoments = sizeof...(kSigned), kEach = kCodeBlock / kLanes, kCodes = 256;
  constexpr bool is_signed[kMoments] = {kSigned...};
  constexpr DType kMasterType = Format{Moments::kDynamic8, kMasters}.TypeOf(0);
  static_assert(F::kArrays == 1 + kMoments);
  __shared__ float numbers[kMoments][kCodes];  // of codes, under a scale of 1
  for (unsigned code = threadIdx.x; code < kCodes; code += blockDim.x) {
    for (unsigned m = 0; m < kMoments; ++m) {
      numbers[m][code] = Decode(is_signed[m], static_cast<uint8_t>(code), 1);
    }
  }
  __syncthreads();
  const auto step = a.constants.As<typename F::Step>();
  const uint64_t thread = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const uint64_t blocks = (a.elements + kCodeBlock - 1) / kCodeBlock,
                 stride = uint64_t{gridDim.x} * blockDim.x / kLanes;
  for (uint64_t block = thread / kLanes; block < blocks; block += stride) {
    const uint64_t first = block * kCodeBlock + thread % kLanes;
    const Strided<kEach, kLanes> own{first, a.elements};
    float element[kEach][F::kArrays] = {}, gradient[kEach];
    float scale[kMoments], largest[kMoments] = {}, least[kMoments] = {};
    for (unsigned m = 0; m < kMoments; ++m) scale[m] = a.state.Floats(2 + 2 * m)[block];
    uint8_t codes[kEach][kMoments];
    own.Each([&](unsigned e, uint64_t i) {
      element[e][0] = LoadElement({a.state.arrays[0], kMasterType}, i);
      SUPEROFFLOAD_UNROLL
      for (unsigned m = 0; m < kMoments; ++m) codes[e][m] = static_cast<const uint8_t*>(a.state.arrays[1 + 2 * m])[i];
    });
    own.Load(a.gradient, gradient);
    WordDrawer words(a, step.step, RoundingPair(0));
    own.Each([&](unsigned e, uint64_t i) {
      SUPEROFFLOAD_UNROLL
      for (unsigned m = 0; m < kMoments; ++m) {
        element[e][1 + m] = codes[e][m] == 0 ? 0 : numbers[m][codes[e][m]] * scale[m];
      }
      F::Update(step, gradient[e], element[e]);
      if constexpr (kMasters == Masters::kRoundedBFloat16) {
        element[e][0] = RoundedMaster(element[e][0], words.Draw(i));
      }
      StoreElement({a.state.arrays[0], kMasterType}, i, element[e][0]);
      SUPEROFFLOAD_UNROLL
      for (unsigned m = 0; m < kMoments; ++m) {
        const float value = element[e][1 + m];  // a NaN is neither
        if (value > largest[m]) largest[m] = value;
        if (value < least[m]) least[m] = value;
      }
    });
    own.StoreFirst(a.theta, element);
    float inverse[kMoments];
    SUPEROFFLOAD_UNROLL
    for (unsigned m = 0; m < kMoments; ++m) {
      scale[m] = DynamicCode<true>::ScaleOf(LargestOfWarp(largest[m]), -LargestOfWarp(-least[m]));
      inverse[m] = DynamicCode<true>::InverseOf(scale[m]);
      if (thread % kLanes == 0) a.state.Floats(2 + 2 * m)[block] = scale[m];
    }
    own.Each([&](unsigned e, uint64_t i) {
      SUPEROFFLOAD_UNROLL
      for (unsigned m = 0; m < kMoments; ++m) {
        static_cast<uint8_t*>(a.state.arrays[1 + 2 * m])[i] = Encode(is_signed[m], element[e][1 + m], inverse[m]);
      }
    });
  }
}

}  // namespace residents

#define SUPEROFFLOAD_RESIDENT_KERNEL(name, ...)                                                      \
  extern "C" __global__ void __launch_bounds__(kResidentThreads) name(ResidentArguments arguments) { \
    __VA_ARGS__(arguments);                                                                          \
  }
SUPEROFFLOAD_FOR_EACH_RESIDENT_KERNEL(SUPEROFFLOAD_RESIDENT_KERNEL)

}  // namespace superoffload::kernels
