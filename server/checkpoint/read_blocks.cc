#include "server/checkpoint/read_blocks.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/shard_plan.h"

namespace superoffload::checkpoint {
namespace {

constexpr uint64_t kStretchElements = 64 * 1024;  // that are put together at a time; whole blocks

// What a slice has of a stretch: codes of its own elements [from, from + count), and the scales of the blocks they lie
// in.
struct Run {
  const SavedTensors::Slice* slice;
  SharedRun shared;
  std::vector<std::byte> codes, scales;

  uint64_t end() const { return shared.at + shared.count; }
};

class Blocks {
 public:
  Blocks(const SavedTensors::Tensor& tensor, const kernels::Algorithm& algorithm, const kernels::StateArray& array)
      : tensor_(tensor),
        codec_(*array.codec),
        block_(algorithm.block_elements),
        code_bytes_(kernels::DTypeBytes(array.dtype)),
        scale_bytes_(kernels::DTypeBytes(algorithm.arrays[array.codec->scales].dtype)),
        values_(block_),
        decoded_(block_) {}

  absl::Status Read(std::byte* codes, std::byte* scales, const ReadScope& scope) {
    const uint64_t elements = tensor_.box.Elements();
    for (uint64_t begin = 0; begin < elements; begin += kStretchElements) {
      const uint64_t end = std::min(elements, begin + kStretchElements);
      if (absl::Status status = scope.CheckGoesOn(); !status.ok()) return status;
      if (absl::Status status = Collect(begin, end); !status.ok()) return status;
      auto run = runs_.begin();
      for (uint64_t first = begin; first < end; first += block_) {
        const uint64_t last = std::min(end, first + block_);
        while (run->end() <= first) ++run;
        std::byte* const scale = scales + first / block_ * scale_bytes_;
        if (IsWhole(*run, first, last)) {
          std::memcpy(codes + first * code_bytes_, CodesAt(*run, first), (last - first) * code_bytes_);
          std::memcpy(scale, ScaleAt(*run, first), scale_bytes_);
        } else {
          Join(run, first, last);
          codec_.encode(last - first, values_.data(), codes + first * code_bytes_, scale);
          ++encoded_again_;
        }
      }
    }
    return absl::OkStatus();
  }

  uint64_t encoded_again() const { return encoded_again_; }

 private:
  // What the slices have of elements [begin, end), in their order.
  absl::Status Collect(uint64_t begin, uint64_t end) {
    runs_.clear();
    for (const SavedTensors::Slice* slice : tensor_.slices) {
      const absl::Status status = ForEachSharedRun(slice->box, tensor_.box, [&](SharedRun shared) {
        const uint64_t first = std::max(begin, shared.at), last = std::min(end, shared.at + shared.count);
        if (first >= last) return absl::OkStatus();
        return Add(slice, {shared.from + (first - shared.at), first, last - first});
      });
      if (!status.ok()) return status;
    }
    std::sort(runs_.begin(), runs_.end(), [](const Run& a, const Run& b) { return a.shared.at < b.shared.at; });
    return absl::OkStatus();
  }

  // With the rest of the blocks in which the run begins and ends, so that each can be decoded.
  absl::Status Add(const SavedTensors::Slice* slice, const SharedRun& shared) {
    const uint64_t first = FirstBlock(shared), end = (shared.from + shared.count + block_ - 1) / block_;
    const uint64_t last = std::min(end * block_, slice->box.Elements());
    Run run{slice, shared, std::vector<std::byte>((last - first * block_) * code_bytes_),
            std::vector<std::byte>((end - first) * scale_bytes_)};
    if (absl::Status status =
            slice->file->file.ReadAt(slice->offset + first * block_ * code_bytes_, run.codes.data(), run.codes.size());
        !status.ok()) {
      return status;
    }
    if (absl::Status status = slice->scales->file->file.ReadAt(slice->scales->offset + first * scale_bytes_,
                                                               run.scales.data(), run.scales.size());
        !status.ok()) {
      return status;
    }
    runs_.push_back(std::move(run));
    return absl::OkStatus();
  }

  uint64_t FirstBlock(const SharedRun& shared) const { return shared.from / block_; }

  // The element of the slice that is element `at` of the tensor.
  static uint64_t InSlice(const Run& run, uint64_t at) { return run.shared.from + (at - run.shared.at); }

  const std::byte* CodesAt(const Run& run, uint64_t at) const {
    return run.codes.data() + (InSlice(run, at) - FirstBlock(run.shared) * block_) * code_bytes_;
  }
  const std::byte* ScaleAt(const Run& run, uint64_t at) const {
    return run.scales.data() + (InSlice(run, at) / block_ - FirstBlock(run.shared)) * scale_bytes_;
  }

  // Whether the slice has elements [first, last) as one block.
  bool IsWhole(const Run& run, uint64_t first, uint64_t last) const {
    const uint64_t from = InSlice(run, first);
    const uint64_t end = std::min(from + block_, run.slice->box.Elements());
    return from % block_ == 0 && end - from == last - first && run.end() >= last;
  }

  // The values of elements [first, last), of which `run` has the first.
  void Join(std::vector<Run>::const_iterator run, uint64_t first, uint64_t last) {
    for (uint64_t at = first; at < last;) {
      while (run->end() <= at) ++run;
      const uint64_t from = InSlice(*run, at), block = from / block_ * block_;
      const uint64_t in_block = std::min(block_, run->slice->box.Elements() - block);
      const std::byte* const codes = run->codes.data() + (block - FirstBlock(run->shared) * block_) * code_bytes_;
      codec_.decode(in_block, codes, ScaleAt(*run, at), decoded_.data());
      const uint64_t count = std::min({last, run->end(), at + (block + in_block - from)}) - at;
      std::copy_n(decoded_.begin() + static_cast<ptrdiff_t>(from - block), count,
                  values_.begin() + static_cast<ptrdiff_t>(at - first));
      at += count;
    }
  }

  const SavedTensors::Tensor& tensor_;
  const kernels::BlockCodec& codec_;
  const uint64_t block_, code_bytes_, scale_bytes_;
  std::vector<Run> runs_;  // of the stretch at hand
  std::vector<float> values_, decoded_;
  uint64_t encoded_again_ = 0;
};

}  // namespace

absl::Status CheckBlocks(const SavedTensors::Tensor& tensor, const kernels::Algorithm& algorithm,
                         const kernels::StateArray& array) {
  const kernels::StateArray& scales = algorithm.arrays[array.codec->scales];
  for (const SavedTensors::Slice* slice : tensor.slices) {
    const std::string& path = slice->file->file.path();
    if (slice->scales == nullptr) {
      return absl::DataLossError(absl::StrCat(path, " has codes without their scales; restore an earlier checkpoint"));
    }
    if (slice->block_elements != algorithm.block_elements || slice->scales->dtype != SafetensorsDType(scales.dtype)) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, " has a ", slice->scales->dtype, " scale per ", slice->block_elements,
                       " codes, the optimizer a ", SafetensorsDType(scales.dtype), " per ", algorithm.block_elements,
                       "; restore with the release that saved it"));
    }
    if (const uint64_t blocks = scales.Entries(slice->box.Elements()); slice->scales->box.Elements() != blocks) {
      return absl::DataLossError(absl::StrCat(path, " has ", slice->scales->box.Elements(), " scales of ", blocks,
                                              " blocks; restore an earlier checkpoint"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ReadBlocks(const SavedTensors::Tensor& tensor, const kernels::Algorithm& algorithm,
                                    const kernels::StateArray& array, std::byte* codes, std::byte* scales,
                                    const ReadScope& scope) {
  Blocks blocks(tensor, algorithm, array);
  if (absl::Status status = blocks.Read(codes, scales, scope); !status.ok()) return status;
  return blocks.encoded_again();
}

}  // namespace superoffload::checkpoint
