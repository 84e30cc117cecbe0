#include "server/checkpoint/export_model.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "server/checkpoint/files.h"
#include "server/checkpoint/index.h"
#include "server/checkpoint/partial_directory.h"
#include "server/checkpoint/run_directory.h"
#include "server/checkpoint/safetensors.h"
#include "server/checkpoint/saved_tensors.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr char kMasters[] = "model.";  // tensors of the first array
constexpr char kWeights[] = ".safetensors";

// A parameter's name in the model, whatever it was wrapped into.
std::string ModelName(const std::string& parameter) {
  std::string name = absl::StrReplaceAll(
      parameter, {{"_orig_mod.", ""}, {"_checkpoint_wrapped_module.", ""}, {"_fsdp_wrapped_module.", ""}});
  return absl::StartsWith(name, "module.") ? name.substr(7) : name;
}

// What becomes a tensor of the model.
struct Output {
  const SavedTensors* from;
  SavedTensors::Tensor tensor;
};

class Exporter {
 public:
  explicit Exporter(const ExportOptions& options) : options_(options) {}

  absl::Status Open() {
    if (options_.dtype != "BF16" && options_.dtype != "F32") {
      return absl::InvalidArgumentError(absl::StrCat("dtype is ", options_.dtype, " but must be bf16 or fp32"));
    }
    absl::StatusOr<Checkpoint> checkpoint = OpenCheckpoint(options_.checkpoint);
    if (!checkpoint.ok()) return checkpoint.status();
    report_.committed_steps = checkpoint->parts.front().index.committed_steps;
    for (const Part& part : checkpoint->parts) {
      if (absl::Status status = trained_.AddPart(part); !status.ok()) return status;
    }
    for (const auto& [tensor, slices] : trained_.slices()) {
      if (!absl::StartsWith(tensor, kMasters)) continue;
      const std::string parameter = tensor.substr(std::strlen(kMasters));
      if (absl::StartsWith(parameter, "group") && absl::StrContains(parameter, ".param")) {
        return absl::FailedPreconditionError(
            absl::StrCat("the checkpoint knows parameter \"", parameter,
                         "\" by its place only; pass model.named_parameters() to the optimizer whose checkpoints are "
                         "to be exported"));
      }
      absl::StatusOr<SavedTensors::Tensor> whole =
          trained_.Find(tensor, options_.dtype, Box::Whole(slices.front().box.global_shape));
      if (!whole.ok()) return whole.status();
      const std::string name = ModelName(parameter);
      if (name.empty() || name == kSafetensorsMetadata) {
        return absl::FailedPreconditionError(
            absl::StrCat("parameter \"", parameter, "\" has a name that no tensor of a model can have; rename it"));
      }
      const Output output{&trained_, *std::move(whole)};
      if (!outputs_.emplace(name, output).second) {
        return absl::FailedPreconditionError(absl::StrCat("two parameters of the checkpoint, one of them \"", parameter,
                                                          "\", are \"", name, "\" in the model; rename one"));
      }
    }
    if (outputs_.empty()) return absl::DataLossError(absl::StrCat(options_.checkpoint, " has no weights"));
    report_.tensors = outputs_.size();
    std::vector<SavedTensors::Tensor> tensors;
    for (const auto& [name, output] : outputs_) tensors.push_back(output.tensor);
    return SavedTensors::Verify(tensors);
  }

  // What only the source has.
  absl::Status AddSource() {
    if (options_.source.empty()) return absl::OkStatus();
    std::error_code error;
    bool any = false;
    for (const fs::directory_entry& entry : fs::directory_iterator(options_.source, error)) {
      if (!absl::EndsWith(entry.path().filename().string(), kWeights)) continue;
      any = true;
      if (absl::Status status = source_.AddFile(entry.path(), 0); !status.ok()) return status;
    }
    if (error) return FileError(error.value(), "reading", options_.source);
    if (!any) {
      return absl::FailedPreconditionError(absl::StrCat(
          options_.source, " has no safetensors; save the model with save_pretrained(), or name another source"));
    }
    for (const auto& [name, output] : outputs_) {
      const auto found = source_.slices().find(name);
      if (found == source_.slices().end() || found->second.front().box.shape != output.tensor.box.shape) {
        return absl::FailedPreconditionError(
            absl::StrCat("parameter \"", name, "\" [", absl::StrJoin(output.tensor.box.shape, ", "),
                         "] of the checkpoint is ", found == source_.slices().end() ? "not" : "of another shape",
                         " in ", options_.source, "; name the directory of the model that was trained"));
      }
    }
    const std::map<std::string, Output> trained = outputs_;
    for (const auto& [name, slices] : source_.slices()) {
      if (trained.contains(name)) continue;
      absl::StatusOr<const Output*> twin = Twin(slices.front(), trained);
      if (!twin.ok()) return twin.status();
      if (*twin != nullptr) {
        outputs_[name] = **twin;
        ++report_.tied;
      } else {
        const SavedTensors::Slice& slice = slices.front();
        outputs_[name] = {&source_, {slice.box, slice.dtype, {&slice}}};
        ++report_.copied;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Write() {
    absl::StatusOr<std::unique_ptr<PartialDirectory>> directory = PartialDirectory::Create(options_.target);
    if (!directory.ok()) return directory.status();
    if (absl::Status status = WriteShards(**directory); !status.ok()) return status;
    if (absl::Status status = CopyOthers(**directory); !status.ok()) return status;
    return (*directory)->Publish();
  }

  const ExportReport& report() const { return report_; }

 private:
  // The trained tensor whose bytes `slice` has in the source, if there is one: a matrix that is not of one value.
  absl::StatusOr<const Output*> Twin(const SavedTensors::Slice& slice, const std::map<std::string, Output>& trained) {
    if (slice.box.shape.size() < 2) return nullptr;
    for (const auto& [name, output] : trained) {
      const SavedTensors::Slice& theirs = source_.slices().at(name).front();
      if (theirs.box.shape != slice.box.shape || theirs.dtype != slice.dtype) continue;
      const absl::StatusOr<bool> same = SameAndVaried(slice, theirs);
      if (!same.ok()) return same.status();
      if (*same) return &output;
    }
    return nullptr;
  }

  // Whether two slices of one shape and dtype have the same bytes, and not those of one element over and over.
  absl::StatusOr<bool> SameAndVaried(const SavedTensors::Slice& a, const SavedTensors::Slice& b) const {
    const uint64_t width = DTypeBytes(a.dtype), bytes = a.box.Elements() * width;
    const uint64_t most = std::max<uint64_t>(options_.piece_bytes / width, 1) * width;
    std::string first, of_a, of_b;
    bool varied = false;
    for (uint64_t at = 0; at < bytes; at += most) {
      of_a.resize(std::min(most, bytes - at));
      of_b.resize(of_a.size());
      if (absl::Status status = a.file->file.ReadAt(a.offset + at, of_a.data(), of_a.size()); !status.ok()) {
        return status;
      }
      if (absl::Status status = b.file->file.ReadAt(b.offset + at, of_b.data(), of_b.size()); !status.ok()) {
        return status;
      }
      if (of_a != of_b) return false;
      if (at == 0) first = of_a.substr(0, width);
      varied = varied || of_a.compare(0, width, first) != 0 ||
               std::memcmp(of_a.data(), of_a.data() + width, of_a.size() - width) != 0;
    }
    return varied;
  }

  static uint64_t BytesOf(const Output& output) {
    return output.tensor.box.Elements() * DTypeBytes(output.tensor.dtype);
  }

  absl::Status WriteShards(const PartialDirectory& directory) {
    std::vector<std::vector<const std::string*>> shards(1);
    uint64_t filled = 0;
    for (const auto& [name, output] : outputs_) {
      if (!shards.back().empty() && filled + BytesOf(output) > options_.shard_bytes) {
        shards.emplace_back();
        filled = 0;
      }
      shards.back().push_back(&name);
      filled += BytesOf(output);
      report_.bytes += BytesOf(output);
    }
    nlohmann::ordered_json weight_map = nlohmann::ordered_json::object();
    for (size_t i = 0; i < shards.size(); ++i) {
      const std::string file = shards.size() == 1
                                   ? "model.safetensors"
                                   : absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, shards.size());
      for (const std::string* name : shards[i]) weight_map[*name] = file;
      if (absl::Status status = WriteShard(directory / file, shards[i]); !status.ok()) return status;
    }
    report_.files = shards.size();
    if (shards.size() == 1) return absl::OkStatus();
    const nlohmann::ordered_json index = {{"metadata", {{"total_size", report_.bytes}}}, {"weight_map", weight_map}};
    return WriteText(directory / kIndexFile, index.dump(2) + "\n");
  }

  absl::Status WriteShard(const std::string& path, const std::vector<const std::string*>& names) {
    SafetensorsHeader header{.tensors = {}, .metadata = {{"format", "pt"}}};
    uint64_t end = 0;
    for (const std::string* name : names) {
      const Output& output = outputs_.at(*name);
      header.tensors.push_back({*name, output.tensor.dtype, output.tensor.box.shape, end, end + BytesOf(output)});
      end = header.tensors.back().end;
    }
    const std::string encoded = EncodeSafetensorsHeader(header);
    absl::StatusOr<File> file = File::Create(path, encoded.size() + end);
    if (!file.ok()) return file.status();
    if (absl::Status status = file->WriteAt(0, encoded.data(), encoded.size()); !status.ok()) return status;
    for (const SafetensorsTensor& tensor : header.tensors) {
      const Output& output = outputs_.at(tensor.name);
      uint64_t at = encoded.size() + tensor.begin;
      const uint64_t most = std::max<uint64_t>(options_.piece_bytes / DTypeBytes(output.tensor.dtype), 1);
      const absl::Status status = ForEachPiece(output.tensor, most, [&](const SavedTensors::Tensor& piece) {
        std::vector<std::byte> data(piece.box.Elements() * DTypeBytes(piece.dtype));
        if (absl::Status read = SavedTensors::Read(piece, data.data()); !read.ok()) return read;
        at += data.size();
        return file->WriteAt(at - data.size(), data.data(), data.size());
      });
      if (!status.ok()) return status;
    }
    return file->Sync();
  }

  // Calls `with` for boxes of at most `most` elements, which lie one after the other in the tensor.
  static absl::Status ForEachPiece(const SavedTensors::Tensor& tensor, uint64_t most,
                                   const std::function<absl::Status(const SavedTensors::Tensor&)>& with) {
    if (tensor.box.Elements() <= most) return with(tensor);
    const auto rows = std::find_if(tensor.box.shape.begin(), tensor.box.shape.end(), [](uint64_t n) { return n > 1; });
    const size_t dimension = static_cast<size_t>(rows - tensor.box.shape.begin());
    SavedTensors::Tensor above = tensor, below = tensor;
    above.box.shape[dimension] = *rows / 2;
    below.box.shape[dimension] -= above.box.shape[dimension];
    below.box.offset[dimension] += above.box.shape[dimension];
    if (absl::Status status = ForEachPiece(above, most, with); !status.ok()) return status;
    return ForEachPiece(below, most, with);
  }

  static absl::Status WriteText(const std::string& path, const std::string& text) {
    absl::StatusOr<File> file = File::Create(path, 0);
    if (!file.ok()) return file.status();
    if (absl::Status status = file->WriteAt(0, text.data(), text.size()); !status.ok()) return status;
    return file->Sync();
  }

  // Configuration, tokenizer and whatever else lies beside the source's weights.
  absl::Status CopyOthers(const PartialDirectory& directory) const {
    if (options_.source.empty()) return absl::OkStatus();
    static constexpr uint64_t kMaxBytes = uint64_t{1} << 30;
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(options_.source, error)) {
      const std::string name = entry.path().filename();
      const auto ends = [&name](const char* suffix) { return absl::EndsWith(name, suffix); };
      static const auto* const weights = new std::vector<const char*>{kWeights, ".index.json", ".bin",  ".pt",  ".pth",
                                                                      ".h5",    ".msgpack",    ".onnx", ".gguf"};
      if (!entry.is_regular_file(error) || std::any_of(weights->begin(), weights->end(), ends)) continue;
      absl::StatusOr<std::string> text = ReadText(entry.path(), kMaxBytes);
      if (!text.ok()) return text.status();
      if (absl::Status status = WriteText(directory / name, *text); !status.ok()) return status;
    }
    return error ? FileError(error.value(), "reading", options_.source) : absl::OkStatus();
  }

  const ExportOptions options_;
  SavedTensors trained_, source_;
  std::map<std::string, Output> outputs_;  // by name in the model
  ExportReport report_;
};

}  // namespace

absl::StatusOr<ExportReport> ExportModel(const ExportOptions& options) {
  Exporter exporter(options);
  if (absl::Status status = exporter.Open(); !status.ok()) return status;
  if (absl::Status status = exporter.AddSource(); !status.ok()) return status;
  if (absl::Status status = exporter.Write(); !status.ok()) return status;
  return exporter.report();
}

}  // namespace superoffload::checkpoint
