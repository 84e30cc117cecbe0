#include "server/checkpoint/read_blocks.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/shard_plan.h"

namespace superoffload::checkpoint {
namespace {

constexpr uint64_t kStretchElements = 64 * 1024;  // that are put together at a time; whole blocks
constexpr kernels::DType kScaleDType = kernels::DType::kFloat32;

bool IsCodes(const SavedTensors::Slice& slice) { return slice.block_elements > 1; }

// What a slice has of a stretch: its own elements [from, from + count), as codes with the scales of the blocks they lie
// in, or as numbers.
struct Run {
  const SavedTensors::Slice* slice;
  SharedRun shared;
  std::vector<std::byte> codes{}, scales{};
  std::vector<float> numbers{};

  uint64_t end() const { return shared.at + shared.count; }
  uint64_t block() const { return slice->block_elements; }
  uint64_t FirstBlock() const { return shared.from / block(); }

  // The element of the slice that is element `at` of the tensor.
  uint64_t InSlice(uint64_t at) const { return shared.from + (at - shared.at); }

  const std::byte* CodesAt(uint64_t at) const { return codes.data() + (InSlice(at) - FirstBlock() * block()); }
  const std::byte* ScaleAt(uint64_t at) const {
    return scales.data() + (InSlice(at) / block() - FirstBlock()) * kernels::DTypeBytes(kScaleDType);
  }

  // Whether the slice has elements [first, last) as one block of `elements`.
  bool IsBlock(const kernels::BlockCodec& codec, uint64_t elements, uint64_t first, uint64_t last) const {
    if (slice->codec != &codec || block() != elements) return false;
    const uint64_t from = InSlice(first), begin = from / block() * block();
    const uint64_t end_of_block = std::min(begin + block(), slice->box.Elements());
    return from == begin && end_of_block - from == last - first && end() >= last;
  }
};

// The elements of a tensor, a stretch at a time.
class Stretches {
 public:
  explicit Stretches(const SavedTensors::Tensor& tensor) : tensor_(tensor) {}

  // Calls visit(begin, end) for stretches of all elements, one after the other.
  template <typename Visit>
  absl::Status ForEach(const ReadScope& scope, Visit visit) {
    const uint64_t elements = tensor_.box.Elements();
    for (uint64_t begin = 0; begin < elements; begin += kStretchElements) {
      const uint64_t end = std::min(elements, begin + kStretchElements);
      if (absl::Status status = scope.CheckGoesOn(); !status.ok()) return status;
      if (absl::Status status = Collect(begin, end); !status.ok()) return status;
      visit(begin, end);
    }
    return absl::OkStatus();
  }

  // What has element `at` of the stretch that is visited; later ones are asked for later.
  const Run& RunAt(uint64_t at) {
    while (run_->end() <= at) ++run_;
    return *run_;
  }

  // The numbers of elements [first, last).
  void Numbers(uint64_t first, uint64_t last, float* to) {
    auto run = run_;
    for (uint64_t at = first; at < last;) {
      while (run->end() <= at) ++run;
      const uint64_t until = std::min(last, run->end());
      if (IsCodes(*run->slice)) {
        at = Decode(*run, at, until, to + (at - first));
      } else {
        std::copy_n(run->numbers.begin() + static_cast<ptrdiff_t>(at - run->shared.at), until - at, to + (at - first));
        at = until;
      }
    }
  }

 private:
  // What the slices have of elements [begin, end), in their order.
  absl::Status Collect(uint64_t begin, uint64_t end) {
    runs_.clear();
    for (const SavedTensors::Slice* slice : tensor_.slices) {
      const absl::Status status = ForEachSharedRun(slice->box, tensor_.box, [&](SharedRun shared) {
        const uint64_t first = std::max(begin, shared.at), last = std::min(end, shared.at + shared.count);
        if (first >= last) return absl::OkStatus();
        Run& run = runs_.emplace_back(Run{slice, {shared.from + (first - shared.at), first, last - first}});
        return IsCodes(*slice) ? ReadCodes(run) : ReadNumbers(run);
      });
      if (!status.ok()) return status;
    }
    std::sort(runs_.begin(), runs_.end(), [](const Run& a, const Run& b) { return a.shared.at < b.shared.at; });
    run_ = runs_.begin();
    return absl::OkStatus();
  }

  // With the rest of the blocks in which the run begins and ends, so that each can be decoded.
  static absl::Status ReadCodes(Run& run) {
    const SavedTensors::Slice& slice = *run.slice;
    const uint64_t block = run.block(), scale_bytes = kernels::DTypeBytes(kScaleDType);
    const uint64_t first = run.FirstBlock(), end = (run.shared.from + run.shared.count + block - 1) / block;
    run.codes.resize(std::min(end * block, slice.box.Elements()) - first * block);
    run.scales.resize((end - first) * scale_bytes);
    if (absl::Status status = slice.file->file.ReadAt(slice.offset + first * block, run.codes.data(), run.codes.size());
        !status.ok()) {
      return status;
    }
    return slice.scales->file->file.ReadAt(slice.scales->offset + first * scale_bytes, run.scales.data(),
                                           run.scales.size());
  }

  static absl::Status ReadNumbers(Run& run) {
    const kernels::DType dtype = run.slice->dtype == SafetensorsDType(kernels::DType::kFloat32)
                                     ? kernels::DType::kFloat32
                                     : kernels::DType::kBFloat16;
    const uint64_t bytes = kernels::DTypeBytes(dtype);
    std::vector<std::byte> saved(run.shared.count * bytes);
    run.numbers.resize(run.shared.count);
    if (absl::Status status =
            run.slice->file->file.ReadAt(run.slice->offset + run.shared.from * bytes, saved.data(), saved.size());
        !status.ok()) {
      return status;
    }
    kernels::Widen(run.shared.count, {saved.data(), dtype}, run.numbers.data());
    return absl::OkStatus();
  }

  // What the block with element `at` has of elements [at, until). Returns where it ends.
  uint64_t Decode(const Run& run, uint64_t at, uint64_t until, float* to) {
    const uint64_t from = run.InSlice(at), first = from / run.block() * run.block();
    const uint64_t in_block = std::min(run.block(), run.slice->box.Elements() - first);
    decoded_.resize(in_block);
    const std::byte* const codes = run.codes.data() + (first - run.FirstBlock() * run.block());
    run.slice->codec->decode(in_block, codes, run.ScaleAt(at), decoded_.data());
    const uint64_t count = std::min(until, at + (first + in_block - from)) - at;
    std::copy_n(decoded_.begin() + static_cast<ptrdiff_t>(from - first), count, to);
    return at + count;
  }

  const SavedTensors::Tensor& tensor_;
  std::vector<Run> runs_;  // of the stretch at hand
  std::vector<Run>::const_iterator run_;
  std::vector<float> decoded_;
};

}  // namespace

bool HasBlocks(const SavedTensors::Tensor& tensor) {
  return std::any_of(tensor.slices.begin(), tensor.slices.end(),
                     [](const SavedTensors::Slice* slice) { return IsCodes(*slice); });
}

absl::Status CheckBlocks(const SavedTensors::Tensor& tensor, const kernels::StateArray& array) {
  for (const SavedTensors::Slice* slice : tensor.slices) {
    const std::string& path = slice->file->file.path();
    if (!IsCodes(*slice) && (array.codec == nullptr || slice->dtype != tensor.dtype)) continue;
    if (!IsCodes(*slice) || slice->scales == nullptr) {
      return absl::DataLossError(absl::StrCat(path, " has codes without their scales; restore an earlier checkpoint"));
    }
    if (slice->codec == nullptr || slice->dtype != SafetensorsDType(kernels::DType::kUInt8) ||
        slice->scales->dtype != SafetensorsDType(kScaleDType)) {
      return absl::FailedPreconditionError(absl::StrCat(path, " has ", slice->dtype, " codes with ",
                                                        slice->scales->dtype,
                                                        " scales that this daemon does not know; restore with the "
                                                        "release that saved it"));
    }
    const uint64_t blocks = (slice->box.Elements() + slice->block_elements - 1) / slice->block_elements;
    if (slice->scales->box.Elements() != blocks) {
      return absl::DataLossError(absl::StrCat(path, " has ", slice->scales->box.Elements(), " scales of ", blocks,
                                              " blocks; restore an earlier checkpoint"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadBlocks(const SavedTensors::Tensor& tensor, const kernels::Algorithm& algorithm,
                        const kernels::StateArray& array, std::byte* codes, std::byte* scales, const ReadScope& scope,
                        uint64_t* rounded) {
  const kernels::BlockCodec& codec = *array.codec;
  const uint64_t block = algorithm.block_elements, scale_bytes = kernels::DTypeBytes(kScaleDType);
  std::vector<float> numbers(block), decoded(block);
  Stretches stretches(tensor);
  return stretches.ForEach(scope, [&](uint64_t begin, uint64_t end) {
    for (uint64_t first = begin; first < end; first += block) {
      const uint64_t last = std::min(end, first + block);
      std::byte* const scale = scales + first / block * scale_bytes;
      const Run& run = stretches.RunAt(first);
      if (run.IsBlock(codec, block, first, last)) {
        std::memcpy(codes + first, run.CodesAt(first), last - first);
        std::memcpy(scale, run.ScaleAt(first), scale_bytes);
        continue;
      }
      stretches.Numbers(first, last, numbers.data());
      codec.encode(last - first, numbers.data(), codes + first, scale);
      codec.decode(last - first, codes + first, scale, decoded.data());
      *rounded += !std::equal(numbers.begin(), numbers.begin() + static_cast<ptrdiff_t>(last - first), decoded.begin());
    }
  });
}

absl::Status ReadDecoded(const SavedTensors::Tensor& tensor, kernels::MutableElements to, const ReadScope& scope) {
  std::vector<float> numbers(kStretchElements);
  Stretches stretches(tensor);
  return stretches.ForEach(scope, [&](uint64_t begin, uint64_t end) {
    stretches.Numbers(begin, end, numbers.data());
    kernels::Narrow(end - begin, numbers.data(),
                    {static_cast<std::byte*>(to.data) + begin * DTypeBytes(to.dtype), to.dtype});
  });
}

}  // namespace superoffload::checkpoint
