// The GPU kernels on a GPU: their bits against the CPU's, their speed against the GPU's own copies. Prints one table
// and ends with "checks=N failures=M"; exit status 2 when there is no GPU to check. Usage: kernel_check [--elements N]
// N per measurement, 256 Mi unless told
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/algorithm.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/float_conversion.h"
#include "superoffload/v1/exit_status.h"
#include "tests/support/random_elements.h"

namespace superoffload::kernels {
namespace {

[[noreturn]] void Die(const CudaStatus& status) {
  std::fprintf(stderr, "kernel_check: %s\n", status.message.c_str());
  std::exit(2);
}

const char* Name(DType dtype) {
  return dtype == DType::kBFloat16 ? "bfloat16" : dtype == DType::kFloat16 ? "float16" : "float32";
}

class Gpu {
 public:
  Gpu() {
    CudaStatus status;
    driver_ = CudaDriver::Load(&status);
    if (driver_ == nullptr) Die(status);
    CudaDevice device;
    Check(driver_->DeviceGet(&device, 0), "finding the GPU");
    char name[256] = "";
    Check(driver_->DeviceGetName(name, sizeof(name), device), "naming the GPU");
    CudaContext context;
    Check(driver_->DevicePrimaryCtxRetain(&context, device), "making a context");
    Check(driver_->CtxSetCurrent(context), "using a context");
    if (status = kernels_.Load(*driver_, device); !status.ok()) Die(status);
    Check(driver_->StreamCreate(&stream_, 1), "making a stream");
    Check(driver_->EventCreate(&begin_, 0), "making an event");
    Check(driver_->EventCreate(&end_, 0), "making an event");
    std::printf("%s\n", name);
  }

  void Check(int result, const char* call) const {
    if (const CudaStatus status = driver_->Status(result, call); !status.ok()) Die(status);
  }
  void Check(const CudaStatus& status) const {
    if (!status.ok()) Die(status);
  }

  void* Allocate(size_t bytes) const {
    CudaPointer pointer;
    Check(driver_->MemAlloc(&pointer, bytes), "allocating GPU memory");
    return reinterpret_cast<void*>(pointer);
  }
  template <typename T>
  T* Upload(const std::vector<T>& host) const {
    void* const device = Allocate(host.size() * sizeof(T));
    Check(
        driver_->MemcpyHtoDAsync(reinterpret_cast<CudaPointer>(device), host.data(), host.size() * sizeof(T), stream_),
        "copying to the GPU");
    return static_cast<T*>(device);
  }
  template <typename T>
  std::vector<T> Download(const T* device, size_t n) const {
    std::vector<T> host(n);
    Check(driver_->MemcpyDtoHAsync(host.data(), reinterpret_cast<CudaPointer>(device), n * sizeof(T), stream_),
          "copying from the GPU");
    Check(driver_->StreamSynchronize(stream_), "waiting for the GPU");
    return host;
  }
  void Free(const void* device) const { driver_->MemFree(reinterpret_cast<CudaPointer>(device)); }

  // Median seconds of several runs.
  template <typename Work>
  double Seconds(Work work) const {
    std::vector<float> milliseconds;
    for (int i = 0; i < 11; ++i) {
      Check(driver_->EventRecord(begin_, stream_), "recording an event");
      work();
      Check(driver_->EventRecord(end_, stream_), "recording an event");
      Check(driver_->StreamSynchronize(stream_), "waiting for the GPU");
      Check(driver_->EventElapsedTime(&milliseconds.emplace_back(), begin_, end_), "reading events");
    }
    std::nth_element(milliseconds.begin(), milliseconds.begin() + 5, milliseconds.end());
    return milliseconds[5] * 1e-3;
  }

  const CudaDriver& driver() const { return *driver_; }
  const CudaKernels& kernels() const { return kernels_; }
  CudaStream stream() const { return stream_; }

 private:
  const CudaDriver* driver_;
  CudaKernels kernels_;
  CudaStream stream_;
  CudaEvent begin_, end_;
};

// A table of tensors where kernels read it: in pinned memory of the host.
class PinnedTable {
 public:
  PinnedTable(const Gpu& gpu, const std::vector<PackedTensor>& tensors, uint64_t elements) : gpu_(gpu) {
    const size_t chunks = (elements + kChunkElements - 1) / kChunkElements;
    const size_t tensors_bytes = tensors.size() * sizeof(PackedTensor);
    gpu_.Check(gpu_.driver().MemHostAlloc(&data_, tensors_bytes + (chunks + 1) * sizeof(uint32_t), 1),
               "allocating pinned memory");
    auto* const table = static_cast<PackedTensor*>(data_);
    auto* const begins = reinterpret_cast<uint32_t*>(table + tensors.size());
    std::copy(tensors.begin(), tensors.end(), table);
    IndexChunks(tensors, elements, begins);
    table_ = {table, begins, static_cast<uint32_t>(tensors.size())};
  }
  ~PinnedTable() { gpu_.driver().MemFreeHost(data_); }
  const PackTable& get() const { return table_; }

 private:
  const Gpu& gpu_;
  void* data_ = nullptr;
  PackTable table_{};
};

struct Tally {
  int checks = 0, failures = 0;
  void Report(const std::string& what, bool good) {
    ++checks;
    failures += good ? 0 : 1;
    std::printf("%-48s %s\n", what.c_str(), good ? "same bits" : "DIFFERENT");
  }
};

constexpr int kLowest = -80;  // exponent of the smallest gradients, some of which are flushed

void CheckPack(const Gpu& gpu, DType dtype, DType slot_dtype, Tally& tally) {
  std::mt19937 random(static_cast<unsigned>(dtype) + 1);
  const uint64_t elements = 3 * kChunkElements + 777;
  std::vector<PackedTensor> tensors;
  std::vector<float> expected(elements, 0.0f);
  for (uint64_t first = 0; first + 64 < elements;) {
    const uint64_t n = std::min<uint64_t>(1 + random() % 20000, elements - first);
    const std::vector<std::byte> data = test::RandomElements(n, dtype, kLowest, random);
    tensors.push_back({gpu.Upload(data), first, n});
    for (uint64_t i = 0; i < n; ++i) {
      float stored = 0;
      StoreElement({&stored, slot_dtype}, 0, LoadElement({data.data(), dtype}, i));
      expected[first + i] = LoadElement({&stored, slot_dtype}, 0);
    }
    first = (first + n + 63) / 64 * 64;
  }
  const size_t chunks = (elements + kChunkElements - 1) / kChunkElements;
  std::byte* const slot = gpu.Upload(std::vector<std::byte>(elements * DTypeBytes(slot_dtype), std::byte{0xff}));
  double* const sums = gpu.Upload(std::vector<double>(chunks, -1));
  const PinnedTable table(gpu, tensors, elements);
  gpu.Check(gpu.kernels().Pack({table.get(), dtype, {slot, slot_dtype}, elements, sums}, gpu.stream()));
  const std::vector<std::byte> packed = gpu.Download(slot, elements * DTypeBytes(slot_dtype));
  bool good = true;
  for (uint64_t i = 0; i < elements; ++i) {
    const float actual = LoadElement({packed.data(), slot_dtype}, i);
    good = good && std::memcmp(&actual, &expected[i], sizeof(float)) == 0;
  }
  const std::vector<double> actual_sums = gpu.Download(sums, chunks);
  for (size_t c = 0; c < chunks; ++c) {
    const uint64_t first = c * kChunkElements, n = std::min<uint64_t>(kChunkElements, elements - first);
    good = good && actual_sums[c] == SumOfSquares(n, {&expected[first], DType::kFloat32});
  }
  tally.Report(std::string("pack and norm, ") + Name(dtype) + " to " + Name(slot_dtype), good);
  for (const PackedTensor& tensor : tensors) gpu.Free(tensor.data);
  gpu.Free(slot);
  gpu.Free(sums);
}

void CheckResident(const Gpu& gpu, DType dtype, const Algorithm& algorithm, Tally& tally) {
  constexpr uint64_t kRows = 1200, kColumns = 117, kElements = kRows * kColumns;  // of a larger tensor
  std::mt19937 random(99);
  BoxElements box;
  bool good = BoxElements::Make({{kRows, kColumns}}, {{1300, 2000}}, {{13, 450}}, &box);
  std::vector<std::vector<std::byte>> state;
  for (const StateArray& array : algorithm.arrays) state.emplace_back(array.Bytes(kElements));
  if (algorithm.rounds_masters) {
    std::ranges::fill(std::span(reinterpret_cast<uint16_t*>(state[0].data()), kElements), NarrowToBFloat16(0.25f));
  } else {
    std::ranges::fill(std::span(reinterpret_cast<float*>(state[0].data()), kElements), 0.25f);
  }
  std::vector<std::byte> theta(kElements * DTypeBytes(dtype));
  StateView gpu_state;
  for (size_t a = 0; a < state.size(); ++a) gpu_state.arrays[a] = gpu.Upload(state[a]);
  const PhiloxKey key{{5, 6}};
  gpu_state.rounding = {key, nullptr, 0};
  std::byte* const gpu_theta = gpu.Upload(theta);
  for (uint64_t t = 1; t <= 5; ++t) {
    const std::vector<std::byte> gradient = test::RandomElements(kElements, dtype, kLowest, random);
    const StepConstants constants = algorithm.make_constants(algorithm.DefaultScalars().data(), t, 0.5);
    std::byte* const gpu_gradient = gpu.Upload(gradient);
    gpu.Check(gpu.kernels().Resident(
        algorithm, {gpu_state, constants, {gpu_gradient, dtype}, {gpu_theta, dtype}, kElements, box}, gpu.stream()));
    for (size_t first = 0; first < kElements; first += kChunkElements) {
      const size_t bytes = first * DTypeBytes(dtype);
      StateView view;
      for (size_t a = 0; a < state.size(); ++a) {
        view.arrays[a] = state[a].data() + algorithm.arrays[a].Bytes(first);
      }
      view.rounding = {key, &box, first};
      algorithm.best().plain(0, std::min<size_t>(kChunkElements, kElements - first), view, constants,
                             {gradient.data() + bytes, dtype}, {theta.data() + bytes, dtype});
    }
    gpu.Download(gpu_gradient, 1);
    gpu.Free(gpu_gradient);
  }
  good = good && gpu.Download(gpu_theta, theta.size()) == theta;
  for (size_t a = 0; a < state.size(); ++a) {
    auto* const array = static_cast<std::byte*>(gpu_state.arrays[a]);
    good = good && gpu.Download(array, state[a].size()) == state[a];
    gpu.Free(array);
  }
  gpu.Free(gpu_theta);
  tally.Report("resident " + std::string(algorithm.name) + ", " + Name(dtype), good);
}

void Measure(const Gpu& gpu, size_t elements) {
  std::mt19937 random(1);
  std::vector<float> values(1 << 20);
  std::generate(values.begin(), values.end(), [&] { return std::normal_distribution<float>()(random); });
  // Holds values: what is measured on zeros, or on nothing at all, may be another speed.
  const auto memory = [&](size_t bytes) {
    auto* const memory = static_cast<std::byte*>(gpu.Allocate(bytes));
    const size_t most = values.size() * sizeof(float);
    for (size_t done = 0; done < bytes; done += most) {
      gpu.Check(gpu.driver().MemcpyHtoDAsync(reinterpret_cast<CudaPointer>(memory + done), values.data(),
                                             std::min(most, bytes - done), gpu.stream()),
                "copying to the GPU");
    }
    gpu.Check(gpu.driver().StreamSynchronize(gpu.stream()), "waiting for the GPU");
    return memory;
  };
  void *from = memory(2 * elements), *to = memory(4 * elements);
  StateView state;  // as the widest format has it
  for (void*& array : state.arrays) array = memory(4 * elements);
  auto* const sums = reinterpret_cast<double*>(memory((elements / kChunkElements + 1) * sizeof(double)));
  const PinnedTable whole(gpu, {{from, 0, elements}}, elements);
  // Of a thousand tensors each, as in a model of many small ones; none ends where a tile does.
  std::vector<PackedTensor> pieces;
  for (uint64_t first = 0; first < elements; first += elements / 1000 + 1) {
    pieces.push_back(
        {static_cast<std::byte*>(from) + 2 * first, first, std::min(elements / 1000 + 1, elements - first)});
  }
  const PinnedTable many(gpu, pieces, elements);
  const auto address = [](void* pointer) { return reinterpret_cast<CudaPointer>(pointer); };
  const double copy = 4.0 * elements / gpu.Seconds([&] {
    gpu.Check(gpu.driver().MemcpyDtoDAsync(address(to), address(from), 2 * elements, gpu.stream()), "copying");
  });
  std::printf("%-48s %8.1f GB/s\n", "copy within the GPU", copy / 1e9);
  const auto row = [&](const char* what, double bytes, double seconds) {
    std::printf("%-48s %8.1f GB/s, %.2f of the copy\n", what, bytes / seconds / 1e9, bytes / seconds / copy);
  };
  // Packing takes as many blocks as outrun the link, so that the trainer's kernels have the others.
  row("pack bfloat16 to bfloat16, with the norm", 4.0 * elements, gpu.Seconds([&] {
    gpu.Check(
        gpu.kernels().Pack({whole.get(), DType::kBFloat16, {to, DType::kBFloat16}, elements, sums}, gpu.stream()));
  }));
  row("the same, of a thousand tensors", 4.0 * elements, gpu.Seconds([&] {
    gpu.Check(gpu.kernels().Pack({many.get(), DType::kBFloat16, {to, DType::kBFloat16}, elements, sums}, gpu.stream()));
  }));
  // The last buckets are small, and nothing shortens the chain of a chunk's additions.
  for (const size_t small : {size_t{2} << 20, size_t{32} << 20}) {
    if (small > elements) continue;
    const PinnedTable table(gpu, {{from, 0, small}}, small);
    row(("the same, a bucket of " + std::to_string(small >> 19) + " MiB").c_str(), 4.0 * small, gpu.Seconds([&] {
      gpu.Check(gpu.kernels().Pack({table.get(), DType::kBFloat16, {to, DType::kBFloat16}, small, sums}, gpu.stream()));
    }));
  }
  row("pack bfloat16 to float32, with the norm", 6.0 * elements, gpu.Seconds([&] {
    gpu.Check(gpu.kernels().Pack({whole.get(), DType::kBFloat16, {to, DType::kFloat32}, elements, sums}, gpu.stream()));
  }));
  for (const char* const name : {"adamw", "adamw_bf16_nearest", "adamw_bf16", "adamw_8bit", "adamw_bf16_bf16_masters",
                                 "adamw_8bit_bf16_masters"}) {
    const Algorithm& algorithm = *FindAlgorithm(name);
    double state_bytes = 0;
    for (const StateArray& array : algorithm.arrays) state_bytes += static_cast<double>(array.Bytes(elements));
    const StepConstants constants = algorithm.make_constants(algorithm.DefaultScalars().data(), 3, 1);
    row(("resident " + std::string(name) + ", bfloat16").c_str(), 2 * state_bytes + 4.0 * elements, gpu.Seconds([&] {
      gpu.Check(gpu.kernels().Resident(
          algorithm, {state, constants, {from, DType::kBFloat16}, {to, DType::kBFloat16}, elements}, gpu.stream()));
    }));
  }
  std::vector<std::byte> host(2 * elements);
  const auto link = [&](const char* what) {
    const double down = gpu.Seconds([&] {
      gpu.Check(gpu.driver().MemcpyDtoHAsync(host.data(), address(from), host.size(), gpu.stream()), "copying");
    });
    const double up = gpu.Seconds([&] {
      gpu.Check(gpu.driver().MemcpyHtoDAsync(address(from), host.data(), host.size(), gpu.stream()), "copying");
    });
    std::printf("%-48s %8.1f GB/s down, %.1f up\n", what, static_cast<double>(host.size()) / down / 1e9,
                static_cast<double>(host.size()) / up / 1e9);
  };
  link("copies over the link, pageable");
  gpu.Check(gpu.driver().MemHostRegister(host.data(), host.size(), 0), "registering host memory");
  link("copies over the link, registered");
  gpu.Check(gpu.driver().MemHostUnregister(host.data()), "unregistering host memory");
}

int Main(size_t elements) {
  const Gpu gpu;
  Tally tally;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    CheckPack(gpu, dtype, dtype, tally);
    for (const DType slot_dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      if (slot_dtype != dtype) CheckPack(gpu, dtype, slot_dtype, tally);
    }
    for (const Algorithm* algorithm : Algorithms()) {
      if (algorithm->resident_kernel == nullptr || (algorithm->rounds_masters && dtype != DType::kBFloat16)) continue;
      CheckResident(gpu, dtype, *algorithm, tally);
    }
  }
  Measure(gpu, elements);
  std::printf("checks=%d failures=%d\n", tally.checks, tally.failures);
  return tally.failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace superoffload::kernels

int main(int argc, char** argv) {
  if (superoffload::AsksForHelp(argc, argv)) {
    std::printf("Compares what kernels do on the GPU with the CPU's, bit by bit, and times them: [--elements N]\n");
    return 0;
  }
  const size_t elements =
      argc == 3 && std::string(argv[1]) == "--elements" ? std::strtoull(argv[2], nullptr, 10) : size_t{256} << 20;
  return superoffload::kernels::Main(elements);
}
