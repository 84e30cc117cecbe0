#include "kernels/cuda/cuda_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/base/check.h"

#ifdef SUPEROFFLOAD_FATBIN_DIRECTORY
// The compiled kernels, for every architecture they were built for.
asm(".section .rodata\n"
    ".balign 16\n"
    "superoffload_pack_fatbin: .incbin \"" SUPEROFFLOAD_FATBIN_DIRECTORY
    "/pack.fatbin\"\n"
    ".balign 16\n"
    "superoffload_product_fatbin: .incbin \"" SUPEROFFLOAD_FATBIN_DIRECTORY
    "/product.fatbin\"\n"
    ".balign 16\n"
    "superoffload_resident_fatbin: .incbin \"" SUPEROFFLOAD_FATBIN_DIRECTORY
    "/resident.fatbin\"\n"
    ".previous\n");
extern "C" __attribute__((visibility("hidden"))) const unsigned char superoffload_pack_fatbin[],
    superoffload_product_fatbin[], superoffload_resident_fatbin[];
#endif

namespace superoffload::kernels {
namespace {

// Blocks of a kernel that strides: enough to fill any GPU several times over.
constexpr uint64_t kMaxStridingBlocks = 4096;

// Bytes per second of the copy down: of NVLink-C2C as nvbandwidth measures it on a GH200 (297 GB/s), and of PCIe 5.0
// with 16 lanes, before its packets' headers. Neither need be exact: see kPackMargin.
constexpr double kCoherentLink = 300e9, kPcieLink = 64e9;
// Clock cycles from one addition of a chunk's sum to the next: fp64's latency, of 8 cycles or so, and as much again for
// loads and barriers. Assumed, not measured.
constexpr double kCyclesPerAddition = 16;
// Packing has to outrun the copy, also where the clock is lower than its maximum and a few blocks wait for a place.
constexpr double kPackMargin = 2;
constexpr double kHzPerKhz = 1000;

size_t Index(DType dtype) { return static_cast<size_t>(dtype); }

// 0: the driver does not know it.
int Attribute(const CudaDriver& driver, CudaDevice device, int attribute) {
  int value = 0;
  return driver.DeviceGetAttribute(&value, attribute, device) == 0 ? value : 0;
}

}  // namespace

void IndexChunks(std::span<const PackedTensor> tensors, uint64_t elements, uint32_t* begins) {
  uint32_t tensor = 0;
  const uint64_t chunks = (elements + kChunkElements - 1) / kChunkElements;
  for (uint64_t chunk = 0; chunk <= chunks; ++chunk) {
    const uint64_t begin = chunk * kChunkElements;
    while (tensor < tensors.size() && tensors[tensor].first + tensors[tensor].elements <= begin) ++tensor;
    begins[chunk] = tensor;
  }
}

// blocks = margin * link / (bytes per second of a block), and a block packs an element per lane of each of its chunks
// every kCyclesPerAddition.
uint64_t PackBlocks(double link_bytes_per_second, double clock_hz, DType slot) {
  if (clock_hz <= 0) return std::numeric_limits<uint64_t>::max();
  const double elements_per_second = kPackRows * kNormLanes * clock_hz / kCyclesPerAddition;
  const double bytes_per_second = elements_per_second * static_cast<double>(DTypeBytes(slot));
  return static_cast<uint64_t>(std::ceil(kPackMargin * link_bytes_per_second / bytes_per_second));
}

CudaStatus CudaKernels::Load(const CudaDriver& driver, CudaDevice device) {
  driver_ = &driver;
  if (CudaStatus status = FindFunctions(); !status.ok()) return status;
  ReadDevice(device);
  return driver.Status(
      driver.FuncSetAttribute(product_, kCudaFunctionDynamicSharedBytes, static_cast<int>(product_dynamic_bytes_)),
      "reserving shared memory");
}

void CudaKernels::ReadDevice(CudaDevice device) {
  const bool coherent = Attribute(*driver_, device, kCudaHostPageTables) != 0;
  const double clock_hz = kHzPerKhz * Attribute(*driver_, device, kCudaClockKhz);
  for (const DType slot : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    most_pack_blocks_[Index(slot)] = PackBlocks(coherent ? kCoherentLink : kPcieLink, clock_hz, slot);
  }
  const auto offered = static_cast<unsigned>(Attribute(*driver_, device, kCudaMostSharedBytesPerBlock));
  const unsigned shared_bytes = std::min(kProductSharedBytes, offered);
  product_dynamic_bytes_ = shared_bytes - std::min(shared_bytes, kProductStaticBytes);
}

CudaStatus CudaKernels::FindFunctions() {
  const CudaDriver& driver = *driver_;
#ifdef SUPEROFFLOAD_FATBIN_DIRECTORY
  CudaModule pack = nullptr, product = nullptr, resident = nullptr;
  for (const auto& [module, image] :
       {std::pair(&pack, superoffload_pack_fatbin), std::pair(&product, superoffload_product_fatbin),
        std::pair(&resident, superoffload_resident_fatbin)}) {
    if (CudaStatus status = driver.Status(driver.ModuleLoadData(module, image), "loading the GPU kernels");
        !status.ok()) {
      return status;
    }
    modules_.push_back(*module);
  }
  for (const Algorithm* algorithm : Algorithms()) {
    const char* const name = algorithm->resident_kernel;
    if (name == nullptr) continue;
    if (CudaStatus status = driver.Status(driver.ModuleGetFunction(&residents_[name], resident, name), name);
        !status.ok()) {
      return status;
    }
  }
#define SUPEROFFLOAD_FIND_PACK_KERNEL(name, from, to)                                                                 \
  if (CudaStatus status =                                                                                             \
          driver.Status(driver.ModuleGetFunction(&packs_[Index(DType::from)][Index(DType::to)], pack, #name), #name); \
      !status.ok()) {                                                                                                 \
    return status;                                                                                                    \
  }
  SUPEROFFLOAD_FOR_EACH_PACK_KERNEL(SUPEROFFLOAD_FIND_PACK_KERNEL)
  return driver.Status(driver.ModuleGetFunction(&product_, product, "superoffload_product"), "superoffload_product");
#else
  constexpr int kUnimplemented = 12;
  return {kUnimplemented, "this was built without GPU kernels; build it where nvcc is"};
#endif
}

void CudaKernels::Unload() {
  for (const CudaModule module : modules_) driver_->ModuleUnload(module);
  modules_.clear();
}

template <typename Arguments>
CudaStatus CudaKernels::Launch(CudaFunction function, const char* name, uint64_t blocks, unsigned threads,
                               unsigned shared_bytes, const Arguments& arguments, CudaStream stream) const {
  void* pointers[] = {const_cast<Arguments*>(&arguments)};
  return driver_->Status(driver_->LaunchKernel(function, static_cast<unsigned>(blocks), 1, 1, threads, 1, 1,
                                               shared_bytes, stream, pointers, nullptr),
                         name);
}

CudaStatus CudaKernels::Pack(const PackArguments& arguments, CudaStream stream) const {
  constexpr uint64_t kBlockElements = kPackRows * kChunkElements;
  const uint64_t needed = (arguments.elements + kBlockElements - 1) / kBlockElements;
  const size_t slot = Index(arguments.slot.dtype);
  return Launch(packs_[Index(arguments.dtype)][slot], "packing gradients", std::min(needed, most_pack_blocks_[slot]),
                kPackThreads, 0, arguments, stream);
}

CudaStatus CudaKernels::Product(const ProductArguments& arguments, CudaStream stream) const {
  SUPEROFFLOAD_CHECK_EQ(arguments.n % kProductTile, 0u);
  const uint64_t tiles = arguments.n / kProductTile;
  return Launch(product_, "multiplying matrices", tiles * tiles, kProductTile * kProductTile, product_dynamic_bytes_,
                arguments, stream);
}

CudaStatus CudaKernels::Resident(const Algorithm& algorithm, const ResidentArguments& arguments,
                                 CudaStream stream) const {
  constexpr uint64_t kBlockElements = kResidentThreads * kResidentEach;
  const uint64_t blocks = (arguments.elements + kBlockElements - 1) / kBlockElements;
  return Launch(residents_.at(algorithm.resident_kernel), "updating a resident bucket",
                std::min(blocks, kMaxStridingBlocks), kResidentThreads, 0, arguments, stream);
}

}  // namespace superoffload::kernels
