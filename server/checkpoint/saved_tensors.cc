#include "server/checkpoint/saved_tensors.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/checkpoint/safetensors.h"
#include "server/memory/crc32.h"

namespace superoffload::checkpoint {
namespace {

constexpr size_t kReadBytes = size_t{16} << 20;
constexpr char kStepsPrefix[] = "steps.";  // of tensors beside the arrays, in files that are no checkpoint

// Whether the box lies in its tensor, and the tensor's bytes fit 64 bits.
bool Fits(const Box& box) {
  if (!TensorBytes(sizeof(double), box.global_shape)) return false;  // no dtype is larger
  if (box.shape.size() != box.global_shape.size() || box.offset.size() != box.global_shape.size()) return false;
  for (size_t i = 0; i < box.shape.size(); ++i) {
    if (box.shape[i] > box.global_shape[i] || box.offset[i] > box.global_shape[i] - box.shape[i]) return false;
  }
  return true;
}

// Of two boxes of one tensor; none when they have no element in common.
std::optional<Box> Intersection(const Box& a, const Box& b) {
  Box both{a.global_shape, {}, {}};
  for (size_t i = 0; i < a.shape.size(); ++i) {
    const uint64_t begin = std::max(a.offset[i], b.offset[i]);
    const uint64_t end = std::min(a.offset[i] + a.shape[i], b.offset[i] + b.shape[i]);
    if (begin >= end) return std::nullopt;
    both.offset.push_back(begin);
    both.shape.push_back(end - begin);
  }
  return both;
}

// Where an element of the tensor lies in `box`, row-major.
uint64_t Place(const Box& box, const std::vector<uint64_t>& element) {
  uint64_t place = 0;
  for (size_t i = 0; i < element.size(); ++i) place = place * box.shape[i] + (element[i] - box.offset[i]);
  return place;
}

std::string Words(const std::string& dtype, const std::vector<uint64_t>& shape) {
  return absl::StrCat(dtype, " [", absl::StrJoin(shape, ", "), "]");
}

// Of an array's tensor: "ARRAY.PARAMETER".
std::string ParameterOf(const std::string& tensor) {
  const size_t dot = tensor.find('.');
  return dot == std::string::npos ? "" : tensor.substr(dot + 1);
}

// Reads what `slice` has of `tensor`: runs of elements that are contiguous in both, one after the other.
absl::Status ReadSlice(const SavedTensors::Slice& slice, const SavedTensors::Tensor& tensor, std::byte* to) {
  const std::optional<Box> both = Intersection(slice.box, tensor.box);
  if (!both) return absl::OkStatus();
  size_t inner = both->shape.size();  // dimensions from here on lie together in one run
  uint64_t run = 1;
  while (inner > 0) {
    --inner;
    run *= both->shape[inner];
    if (both->shape[inner] != slice.box.shape[inner] || both->shape[inner] != tensor.box.shape[inner]) break;
  }
  std::vector<uint64_t> element = both->offset;
  for (;;) {
    const uint64_t from = slice.offset + Place(slice.box, element) * tensor.element_bytes;
    if (absl::Status status = slice.file->file.ReadAt(from, to + Place(tensor.box, element) * tensor.element_bytes,
                                                      run * tensor.element_bytes);
        !status.ok()) {
      return status;
    }
    size_t dimension = inner;
    while (dimension > 0 && ++element[dimension - 1] == both->offset[dimension - 1] + both->shape[dimension - 1]) {
      element[dimension - 1] = both->offset[dimension - 1];
      --dimension;
    }
    if (dimension == 0) return absl::OkStatus();
  }
}

}  // namespace

uint64_t Box::Elements() const { return std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies<>()); }

absl::StatusOr<const SavedTensors::SavedFile*> SavedTensors::Open(const std::string& path, std::vector<Slice>* slices,
                                                                  std::vector<std::string>* names) {
  absl::StatusOr<File> opened = File::Open(path);
  if (!opened.ok()) return opened.status();
  const SavedFile* const saved =
      files_.insert_or_assign(path, std::make_unique<SavedFile>(SavedFile{*std::move(opened), path, std::nullopt}))
          .first->second.get();
  absl::StatusOr<uint64_t> bytes = saved->file.Bytes();
  if (!bytes.ok()) return bytes.status();
  std::string text(kSafetensorsLengthBytes, '\0');
  if (absl::Status status = saved->file.ReadAt(0, text.data(), text.size()); !status.ok()) return status;
  absl::StatusOr<uint64_t> length = ParseSafetensorsLength(text, *bytes);
  if (!length.ok()) return In(path, length.status());
  text.resize(*length);
  if (absl::Status status = saved->file.ReadAt(kSafetensorsLengthBytes, text.data(), text.size()); !status.ok()) {
    return status;
  }
  const uint64_t data_offset = kSafetensorsLengthBytes + *length;
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(text, *bytes - data_offset);
  if (!header.ok()) return In(path, header.status());
  for (SafetensorsTensor& tensor : header->tensors) {
    slices->push_back({saved, data_offset + tensor.begin, std::move(tensor.dtype), Box::Whole(tensor.shape), 0});
    names->push_back(std::move(tensor.name));
  }
  return saved;
}

absl::Status SavedTensors::AddPart(const Part& part) {
  std::set<std::string> files;
  for (const auto& [tensor, file] : part.index.tensor_files) files.insert(file);
  for (const std::string& name : files) {
    const std::string path = absl::StrCat(part.directory, "/", name);
    if (files_.contains(path)) continue;  // the directory is named twice
    std::vector<Slice> slices;
    std::vector<std::string> names;
    absl::StatusOr<const SavedFile*> file = Open(path, &slices, &names);
    if (!file.ok()) return file.status();
    if (const auto found = part.index.file_crc32.find(name); found != part.index.file_crc32.end()) {
      files_.at(path)->crc32 = found->second;
    }
    for (size_t i = 0; i < slices.size(); ++i) {
      const std::string parameter = ParameterOf(names[i]);
      if (const auto place = part.index.shards.find(parameter); place != part.index.shards.end()) {
        slices[i].box.global_shape = place->second.global_shape;
        slices[i].box.offset = place->second.global_offset;
        if (!Fits(slices[i].box)) {
          return absl::DataLossError(absl::StrCat(part.directory, ": the shard of tensor \"", names[i],
                                                  "\" does not lie in a tensor; restore an earlier checkpoint"));
        }
      }
      const auto steps = part.index.parameter_steps.find(parameter);
      slices[i].steps = steps == part.index.parameter_steps.end() ? part.index.committed_steps : steps->second;
      slices_[names[i]].push_back(std::move(slices[i]));
    }
  }
  return absl::OkStatus();
}

absl::Status SavedTensors::AddFile(const std::string& path, uint64_t committed_steps) {
  std::vector<Slice> slices;
  std::vector<std::string> names;
  absl::StatusOr<const SavedFile*> file = Open(path, &slices, &names);
  if (!file.ok()) return file.status();
  std::map<std::string, uint64_t> parameter_steps;
  for (size_t i = 0; i < slices.size(); ++i) {
    if (!absl::StartsWith(names[i], kStepsPrefix)) continue;
    uint64_t steps = 0;
    if (slices[i].dtype != "I64" || !slices[i].box.shape.empty()) {
      return absl::DataLossError(absl::StrCat(path, ": tensor \"", names[i], "\" is no single I64"));
    }
    if (absl::Status status = (*file)->file.ReadAt(slices[i].offset, &steps, sizeof(steps)); !status.ok()) return status;
    if (steps > committed_steps) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": \"", names[i], "\" is ", steps,
                                                     ", but the optimizer has made ", committed_steps,
                                                     " committed steps"));
    }
    parameter_steps[names[i].substr(std::size(kStepsPrefix) - 1)] = steps;
  }
  for (size_t i = 0; i < slices.size(); ++i) {
    const auto steps = parameter_steps.find(ParameterOf(names[i]));
    slices[i].steps = steps == parameter_steps.end() ? committed_steps : steps->second;
    slices_[names[i]] = {std::move(slices[i])};  // what a file has is used rather than a checkpoint's
  }
  return absl::OkStatus();
}

absl::StatusOr<SavedTensors::Tensor> SavedTensors::Find(const std::string& name, const std::string& dtype,
                                                        const Box& box) const {
  const auto found = slices_.find(name);
  if (found == slices_.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the checkpoint has no tensor \"", name,
                     "\"; restore into an optimizer with the algorithm and the parameters of the one "
                     "that was saved, and name the directories of all its ranks"));
  }
  Tensor tensor{box, DTypeBytes(dtype), {}};
  uint64_t missing = box.Elements();
  for (const Slice& slice : found->second) {
    // A file may have the shard alone.
    const bool shard = slice.box == Box::Whole(box.shape) && !slice.file->crc32 && found->second.size() == 1;
    if (slice.dtype != dtype || (!shard && slice.box.global_shape != box.global_shape)) {
      return absl::FailedPreconditionError(
          absl::StrCat("tensor \"", name, "\" is ", Words(slice.dtype, slice.box.global_shape),
                       " in the checkpoint but ", Words(dtype, box.global_shape), " in the optimizer"));
    }
    if (shard) return Tensor{slice.box, tensor.element_bytes, {&slice}};
    const std::optional<Box> both = Intersection(slice.box, box);
    if (!both) continue;
    const auto same = [&slice](const Slice* other) { return other->box == slice.box; };
    if (std::any_of(tensor.slices.begin(), tensor.slices.end(), same)) continue;  // a replica
    for (const Slice* other : tensor.slices) {
      if (Intersection(other->box, slice.box)) {
        return absl::DataLossError(absl::StrCat("shards of tensor \"", name, "\" overlap in ", slice.file->path,
                                                " and ", other->file->path, "; restore an earlier checkpoint"));
      }
    }
    missing -= both->Elements();
    tensor.slices.push_back(&slice);
  }
  if (missing > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the checkpoint lacks ", missing, " elements of tensor \"", name,
                     "\", which was saved in shards; name the directory of the run, or those of all its ranks"));
  }
  return tensor;
}

absl::Status SavedTensors::Verify(const std::vector<Tensor>& tensors) {
  std::set<const SavedFile*> files;
  for (const Tensor& tensor : tensors) {
    for (const Slice* slice : tensor.slices) files.insert(slice->file);
  }
  std::vector<char> buffer(kReadBytes);
  for (const SavedFile* saved : files) {
    if (!saved->crc32) continue;
    absl::StatusOr<uint64_t> bytes = saved->file.Bytes();
    if (!bytes.ok()) return bytes.status();
    uint32_t crc32 = 0;
    for (uint64_t at = 0; at < *bytes; at += kReadBytes) {
      const size_t count = static_cast<size_t>(std::min<uint64_t>(kReadBytes, *bytes - at));
      if (absl::Status status = saved->file.ReadAt(at, buffer.data(), count); !status.ok()) return status;
      crc32 = memory::Crc32(buffer.data(), count, crc32);
    }
    if (crc32 != *saved->crc32) {
      return absl::DataLossError(
          absl::StrCat(saved->path, " is damaged: its CRC-32 is not that of its index; restore an earlier checkpoint"));
    }
  }
  return absl::OkStatus();
}

absl::Status SavedTensors::Read(const Tensor& tensor, std::byte* to) {
  for (const Slice* slice : tensor.slices) {
    if (absl::Status status = ReadSlice(*slice, tensor, to); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace superoffload::checkpoint
