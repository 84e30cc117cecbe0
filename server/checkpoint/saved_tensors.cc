#include "server/checkpoint/saved_tensors.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/elements/elements.h"
#include "server/checkpoint/safetensors.h"
#include "server/memory/crc32.h"

namespace superoffload::checkpoint {
namespace {

constexpr size_t kReadBytes = size_t{16} << 20;
constexpr uint64_t kRunsPerLook = 256;     // small ones, between two looks at whether to go on
constexpr char kStepsPrefix[] = "steps.";  // of tensors beside the arrays, in files that are no checkpoint

std::string Words(const std::string& dtype, const std::vector<uint64_t>& shape) {
  return absl::StrCat(dtype, " [", absl::StrJoin(shape, ", "), "]");
}

// Of an array's tensor: "ARRAY.PARAMETER".
std::string ParameterOf(const std::string& tensor) {
  const size_t dot = tensor.find('.');
  return dot == std::string::npos ? "" : tensor.substr(dot + 1);
}

std::string ArrayOf(const std::string& tensor) { return tensor.substr(0, tensor.find('.')); }

// Whether a tensor has the scales of another array's blocks.
bool HasScales(const std::string& tensor, const BlockedArrays& blocks) {
  const std::string array = ArrayOf(tensor);
  return std::any_of(blocks.begin(), blocks.end(), [&](const auto& blocked) { return blocked.second.scales == array; });
}

constexpr char kFloat32Name[] = "F32", kBFloat16Name[] = "BF16";

bool IsFloat(const std::string& dtype) { return dtype == kFloat32Name || dtype == kBFloat16Name; }

// Where the tensor `name` is one of codes: which scales it has. Some parameters may have floats under an array's name.
void SetScales(const std::string& name, const BlockedArrays& blocks,
               const std::map<std::string, const SavedTensors::Slice*>& scales, SavedTensors::Slice* slice) {
  const auto blocked = blocks.find(ArrayOf(name));
  if (blocked == blocks.end() || IsFloat(slice->dtype)) return;
  slice->block_elements = blocked->second.elements;
  slice->codec = blocked->second.codec;
  const auto found = scales.find(absl::StrCat(blocked->second.scales, ".", ParameterOf(name)));
  if (found != scales.end()) slice->scales = found->second;
}

// `n` elements between fp32 and bf16.
void Convert(size_t n, const std::byte* from, const std::string& to_dtype, std::byte* to) {
  if (to_dtype == kBFloat16Name) {
    kernels::Narrow(n, reinterpret_cast<const float*>(from), {to, kernels::DType::kBFloat16});
  } else {
    kernels::Widen(n, {from, kernels::DType::kBFloat16}, reinterpret_cast<float*>(to));
  }
}

// Reads what `slice` has of `tensor`.
absl::Status ReadSlice(const SavedTensors::Slice& slice, const SavedTensors::Tensor& tensor, std::byte* to,
                       const ReadScope& scope) {
  uint64_t runs = 0;
  const bool converts = slice.dtype != tensor.dtype;
  const size_t saved_bytes = DTypeBytes(slice.dtype), element_bytes = DTypeBytes(tensor.dtype);
  std::vector<std::byte> saved;  // of what is converted
  return ForEachSharedRun(slice.box, tensor.box, [&](const SharedRun& run) {
    const bool looks = runs++ % kRunsPerLook == 0;
    constexpr uint64_t kReadElements = kReadBytes / sizeof(double);
    for (uint64_t done = 0; done < run.count; done += kReadElements) {
      if (looks) {
        if (absl::Status status = scope.CheckGoesOn(); !status.ok()) return status;
      }
      const size_t count = static_cast<size_t>(std::min(kReadElements, run.count - done));
      std::byte* const at = to + (run.at + done) * element_bytes;
      if (converts) saved.resize(count * saved_bytes);
      if (absl::Status status = slice.file->file.ReadAt(slice.offset + (run.from + done) * saved_bytes,
                                                        converts ? saved.data() : at, count * saved_bytes);
          !status.ok()) {
        return status;
      }
      if (converts) Convert(count, saved.data(), tensor.dtype, at);
    }
    return absl::OkStatus();
  });
}

}  // namespace

absl::StatusOr<SavedTensors::SavedFile*> SavedTensors::Open(const std::string& path, std::vector<Slice>* slices,
                                                            std::vector<std::string>* names) {
  if (absl::Status status = scope_.CheckGoesOn(); !status.ok()) return status;
  absl::StatusOr<PooledFile> opened = PooledFile::Open(&pool_, path);
  if (!opened.ok()) return opened.status();
  const uint64_t bytes = opened->bytes();
  if (bytes < kSafetensorsLengthBytes) return In(path, ParseSafetensorsLength("", bytes).status());
  std::string text(kSafetensorsLengthBytes, '\0');
  if (absl::Status status = opened->ReadAt(0, text.data(), text.size()); !status.ok()) return status;
  absl::StatusOr<uint64_t> length = ParseSafetensorsLength(text, bytes);
  if (!length.ok()) return In(path, length.status());
  const absl::StatusOr<memory::MemoryReservation> parsing = scope_.ReserveParsing(path, *length);
  if (!parsing.ok()) return parsing.status();
  text.resize(*length);
  if (absl::Status status = opened->ReadAt(kSafetensorsLengthBytes, text.data(), text.size()); !status.ok()) {
    return status;
  }
  const uint64_t data_offset = kSafetensorsLengthBytes + *length;
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(text, bytes - data_offset);
  if (!header.ok()) return In(path, header.status());
  if (absl::Status status = Charge(path, *header, *length); !status.ok()) return status;
  SavedFile* const saved =
      files_.emplace_back(std::make_unique<SavedFile>(SavedFile{*std::move(opened), std::nullopt})).get();
  for (SafetensorsTensor& tensor : header->tensors) {
    slices->push_back({.file = saved,
                       .offset = data_offset + tensor.begin,
                       .dtype = std::move(tensor.dtype),
                       .box = Box::Whole(tensor.shape)});
    names->push_back(std::move(tensor.name));
  }
  return saved;
}

// What is kept of a file, once it is more than what goes without: of many small ones, too.
absl::Status SavedTensors::Charge(const std::string& path, const SafetensorsHeader& header, uint64_t text_bytes) {
  kept_bytes_ += sizeof(SavedFile) + path.size();
  for (const SafetensorsTensor& tensor : header.tensors) {
    kept_bytes_ += sizeof(Slice) + tensor.name.size() + 4 * sizeof(uint64_t) * tensor.shape.size();
  }
  if (kept_bytes_ <= kFreeTextBytes && text_bytes <= kFreeTextBytes) return absl::OkStatus();
  absl::StatusOr<memory::MemoryReservation> kept = scope_.ReserveKept(path, std::exchange(kept_bytes_, 0));
  if (!kept.ok()) return kept.status();
  reservations_.push_back(*std::move(kept));
  return absl::OkStatus();
}

absl::Status SavedTensors::AddPart(const Part& part) {
  std::map<std::string, const Slice*> scales;  // of this part, by tensor name
  std::vector<std::pair<std::string, Slice>> others;
  std::map<std::string, std::set<std::string>> files;  // what the index says is in each
  for (const auto& [tensor, file] : part.index.tensor_files) files[file].insert(tensor);
  for (auto& [name, tensors] : files) {
    const std::string path = absl::StrCat(part.directory, "/", name);
    if (!of_parts_.insert(path).second) continue;  // the directory is named twice
    std::vector<Slice> slices;
    std::vector<std::string> names;
    absl::StatusOr<SavedFile*> file = Open(path, &slices, &names);
    if (!file.ok()) return file.status();
    if (const auto found = part.index.file_crc32.find(name); found != part.index.file_crc32.end()) {
      (*file)->crc32 = found->second;
    }
    for (const std::string& there : names) tensors.erase(there);
    if (!tensors.empty()) {
      return absl::DataLossError(absl::StrCat(path, " lacks tensor \"", *tensors.begin(),
                                              "\", which it has by its index; restore an earlier checkpoint"));
    }
    for (size_t i = 0; i < slices.size(); ++i) {
      if (HasScales(names[i], part.index.blocks)) {
        scales[names[i]] = &scales_.emplace_back(std::move(slices[i]));
        continue;
      }
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
      others.emplace_back(names[i], std::move(slices[i]));
    }
  }
  for (auto& [name, slice] : others) {
    SetScales(name, part.index.blocks, scales, &slice);
    slices_[name].push_back(std::move(slice));
  }
  return absl::OkStatus();
}

absl::Status SavedTensors::AddFile(const std::string& path, uint64_t committed_steps) {
  std::vector<Slice> slices;
  std::vector<std::string> names;
  absl::StatusOr<SavedFile*> file = Open(path, &slices, &names);
  if (!file.ok()) return file.status();
  std::map<std::string, uint64_t> parameter_steps;
  for (size_t i = 0; i < slices.size(); ++i) {
    if (!absl::StartsWith(names[i], kStepsPrefix)) continue;
    uint64_t steps = 0;
    if (slices[i].dtype != "I64" || !slices[i].box.shape.empty()) {
      return absl::DataLossError(absl::StrCat(path, ": tensor \"", names[i], "\" is no single I64"));
    }
    if (absl::Status status = (*file)->file.ReadAt(slices[i].offset, &steps, sizeof(steps)); !status.ok()) {
      return status;
    }
    if (steps > committed_steps) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": \"", names[i], "\" is ", steps,
                                                     ", but the optimizer has made ", committed_steps,
                                                     " committed steps"));
    }
    parameter_steps[names[i].substr(std::size(kStepsPrefix) - 1)] = steps;
  }
  std::map<std::string, const Slice*> scales;
  for (size_t i = 0; i < slices.size(); ++i) {
    if (HasScales(names[i], blocks_)) scales[names[i]] = &scales_.emplace_back(slices[i]);
  }
  for (size_t i = 0; i < slices.size(); ++i) {
    if (scales.contains(names[i])) continue;
    const auto steps = parameter_steps.find(ParameterOf(names[i]));
    slices[i].steps = steps == parameter_steps.end() ? committed_steps : steps->second;
    SetScales(names[i], blocks_, scales, &slices[i]);
    slices_[names[i]] = {std::move(slices[i])};  // what a file has is used rather than a checkpoint's
  }
  return absl::OkStatus();
}

bool SavedTensors::Tensor::converts() const {
  return std::any_of(slices.begin(), slices.end(), [this](const Slice* slice) { return slice->dtype != dtype; });
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
  Tensor tensor{box, dtype, {}};
  uint64_t missing = box.Elements();
  for (const Slice& slice : found->second) {
    // A file may have the shard alone.
    const bool shard = slice.box == Box::Whole(box.shape) && !slice.file->crc32 && found->second.size() == 1;
    const bool numbers = IsFloat(dtype) || dtype == SafetensorsDType(kernels::DType::kUInt8);
    const bool readable = slice.dtype == dtype || (numbers && (IsFloat(slice.dtype) || slice.codec != nullptr));
    if (!readable || (!shard && slice.box.global_shape != box.global_shape)) {
      return absl::FailedPreconditionError(
          absl::StrCat("tensor \"", name, "\" is ", Words(slice.dtype, slice.box.global_shape),
                       " in the checkpoint but ", Words(dtype, box.global_shape), " in the optimizer"));
    }
    if (shard) return Tensor{slice.box, dtype, {&slice}};
    const std::optional<Box> both = Intersection(slice.box, box);
    if (!both) continue;
    const auto same = [&slice](const Slice* other) { return other->box == slice.box; };
    if (std::any_of(tensor.slices.begin(), tensor.slices.end(), same)) continue;  // a replica
    for (const Slice* other : tensor.slices) {
      if (Intersection(other->box, slice.box)) {
        return absl::DataLossError(absl::StrCat("shards of tensor \"", name, "\" overlap in ", slice.file->file.path(),
                                                " and ", other->file->file.path(), "; restore an earlier checkpoint"));
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

absl::Status SavedTensors::Verify(const std::vector<Tensor>& tensors, const ReadScope& scope) {
  std::set<const SavedFile*> files;
  for (const Tensor& tensor : tensors) {
    for (const Slice* slice : tensor.slices) {
      files.insert(slice->file);
      if (slice->scales != nullptr) files.insert(slice->scales->file);
    }
  }
  std::vector<char> buffer(kReadBytes);
  for (const SavedFile* saved : files) {
    if (!saved->crc32) continue;
    const uint64_t bytes = saved->file.bytes();
    uint32_t crc32 = 0;
    for (uint64_t at = 0; at < bytes; at += kReadBytes) {
      if (absl::Status status = scope.CheckGoesOn(); !status.ok()) return status;
      const size_t count = static_cast<size_t>(std::min<uint64_t>(kReadBytes, bytes - at));
      if (absl::Status status = saved->file.ReadAt(at, buffer.data(), count); !status.ok()) return status;
      crc32 = memory::Crc32(buffer.data(), count, crc32);
    }
    if (crc32 != *saved->crc32) {
      return absl::DataLossError(absl::StrCat(
          saved->file.path(), " is damaged: its CRC-32 is not that of its index; restore an earlier checkpoint"));
    }
  }
  return absl::OkStatus();
}

absl::Status SavedTensors::Read(const Tensor& tensor, std::byte* to, const ReadScope& scope) {
  for (const Slice* slice : tensor.slices) {
    if (absl::Status status = ReadSlice(*slice, tensor, to, scope); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace superoffload::checkpoint
