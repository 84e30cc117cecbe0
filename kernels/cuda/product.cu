// A matrix product, as a trainer's kernels are: what copies beside them cost is measured with it. Nobody uses the
// result. A launch reserves as much shared memory as a library's product takes (kProductSharedBytes), of which this one
// uses two tiles: what is left for packing beside it is what a trainer's products leave.
#include "kernels/cuda/kernels.cuh"

namespace superoffload::kernels {

// One block per tile of c, one thread per element.
extern "C" __global__ void __launch_bounds__(kProductTile* kProductTile) superoffload_product(ProductArguments p) {
  __shared__ float a_tile[kProductTile][kProductTile], b_tile[kProductTile][kProductTile];
  static_assert(sizeof(a_tile) + sizeof(b_tile) == kProductStaticBytes);
  const uint32_t tiles = p.n / kProductTile;
  const uint32_t x = threadIdx.x % kProductTile, y = threadIdx.x / kProductTile;
  const uint64_t row = uint64_t{blockIdx.x / tiles} * kProductTile + y;
  const uint64_t column = uint64_t{blockIdx.x % tiles} * kProductTile + x;
  float sum = 0;
  for (uint32_t tile = 0; tile < p.n; tile += kProductTile) {
    a_tile[y][x] = p.a[row * p.n + tile + x];
    b_tile[y][x] = p.b[(uint64_t{tile} + y) * p.n + column];
    __syncthreads();
    for (uint32_t k = 0; k < kProductTile; ++k) sum += a_tile[y][k] * b_tile[k][x];
    __syncthreads();
  }
  p.c[row * p.n + column] = sum;
}

}  // namespace superoffload::kernels
