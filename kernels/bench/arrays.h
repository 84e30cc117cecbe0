// The arrays that every kernel of a benchmark run works on, in a memfd that another process can map.
#ifndef SUPEROFFLOAD_KERNELS_BENCH_ARRAYS_H_
#define SUPEROFFLOAD_KERNELS_BENCH_ARRAYS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/bench/baselines.h"
#include "kernels/bench/team.h"

namespace superoffload::kernels {

class Arrays {
 public:
  // `elements` each, a multiple of kChunkElements; touched first by the team's threads. Exits when there is no memory.
  Arrays(size_t elements, DType gradient_dtype, DType theta_dtype, Team& team);
  ~Arrays();

  size_t elements() const { return elements_; }
  int fd() const { return fd_; }
  size_t bytes() const { return bytes_; }
  const std::string& pages() const { return pages_; }  // what backs them

  // From element `first` on.
  AdamArrays state(size_t first) const { return {At<float>(0, first), At<float>(1, first), At<float>(2, first)}; }
  // The same numbers as the state of an algorithm of two moments, in whatever they are stored.
  StateView StateOf(const Algorithm& algorithm, size_t first) const {
    static const BoxElements whole;
    StateView view = state(first).view();
    if (algorithm.arrays[1].dtype == DType::kBFloat16) {
      for (int moment = 1; moment <= 2; ++moment) view.arrays[moment] = At<uint16_t>(6 + moment, first);
    } else if (algorithm.block_elements > 1) {
      for (int array = 1; array <= 4; array += 2) {
        view.arrays[array] = At<uint8_t>(8 + array, first);
        view.arrays[array + 1] = At<float>(9 + array, first / algorithm.block_elements);
      }
    }
    if (algorithm.rounds_masters) view.arrays[0] = At<uint16_t>(13, first);
    view.rounding = {{{1, 2}}, &whole, first};
    return view;
  }
  float* peer_gradient(size_t first) const { return At<float>(3, first); }
  ConstElements gradient(size_t first) const { return Elements(4, gradient_dtype_, first); }
  ConstElements pending(size_t first) const { return Elements(5, gradient_dtype_, first); }
  MutableElements theta(size_t first) const {
    return {const_cast<void*>(Elements(6, theta_dtype_, first).data), theta_dtype_};
  }
  size_t offset(int array) const { return offsets_[array]; }  // bytes into the memfd: p, m, v, fp32 gradient, ...

 private:
  template <typename T>
  T* At(int array, size_t first) const {
    return reinterpret_cast<T*>(base_ + offsets_[array]) + first;
  }
  ConstElements Elements(int array, DType dtype, size_t first) const {
    return {base_ + offsets_[array] + first * DTypeBytes(dtype), dtype};
  }
  void Fill(Team& team);

  static constexpr int kArrays = 14;
  const size_t elements_;
  const DType gradient_dtype_, theta_dtype_;
  size_t offsets_[kArrays];
  size_t bytes_ = 0;
  int fd_ = -1;
  std::byte* base_ = nullptr;
  std::string pages_;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_BENCH_ARRAYS_H_
