#include "server/checkpoint/export_model.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
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
#include "kernels/float_conversion.h"
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
  std::string dtype;  // in the file
  bool narrows = false;
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
          trained_.Find(tensor, "F32", Box::Whole(slices.front().box.global_shape));
      if (!whole.ok()) return whole.status();
      outputs_[ModelName(parameter)] = {&trained_, *std::move(whole), options_.dtype, options_.dtype == "BF16"};
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
        return absl::FailedPreconditionError(absl::StrCat(
            "parameter \"", name, "\" [", absl::StrJoin(output.tensor.box.shape, ", "), "] of the checkpoint is ",
            found == source_.slices().end() ? "not" : "of another shape", " in ", options_.source,
            "; name the directory of the model that was trained"));
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
        outputs_[name] = {&source_, {slice.box, DTypeBytes(slice.dtype), {&slice}}, slice.dtype};
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
      absl::StatusOr<std::string> a = Bytes(slice), b = Bytes(theirs);
      if (!a.ok()) return a.status();
      if (!b.ok()) return b.status();
      const size_t width = DTypeBytes(slice.dtype);
      const bool one_value = a->size() <= width || std::memcmp(a->data(), a->data() + width, a->size() - width) == 0;
      if (*a == *b && !one_value) return &output;
    }
    return nullptr;
  }

  absl::StatusOr<std::string> Bytes(const SavedTensors::Slice& slice) {
    std::string data(slice.box.Elements() * DTypeBytes(slice.dtype), '\0');
    if (absl::Status status = slice.file->file.ReadAt(slice.offset, data.data(), data.size()); !status.ok()) return status;
    return data;
  }

  static uint64_t BytesOf(const Output& output) {
    return output.tensor.box.Elements() * DTypeBytes(output.dtype);
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
      const std::string file = shards.size() == 1 ? "model.safetensors"
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
      header.tensors.push_back({*name, output.dtype, output.tensor.box.shape, end, end + BytesOf(output)});
      end = header.tensors.back().end;
    }
    const std::string encoded = EncodeSafetensorsHeader(header);
    absl::StatusOr<File> file = File::Create(path, encoded.size() + end);
    if (!file.ok()) return file.status();
    if (absl::Status status = file->WriteAt(0, encoded.data(), encoded.size()); !status.ok()) return status;
    for (const SafetensorsTensor& tensor : header.tensors) {
      const Output& output = outputs_.at(tensor.name);
      std::vector<std::byte> data(output.narrows ? 2 * BytesOf(output) : BytesOf(output));
      if (absl::Status status = SavedTensors::Read(output.tensor, data.data()); !status.ok()) return status;
      if (output.narrows) Narrow(data);
      if (absl::Status status = file->WriteAt(encoded.size() + tensor.begin, data.data(), data.size()); !status.ok()) {
        return status;
      }
    }
    return file->Sync();
  }

  // fp32 to bf16, in place.
  static void Narrow(std::vector<std::byte>& data) {
    for (size_t i = 0; i < data.size() / 4; ++i) {
      float wide;
      std::memcpy(&wide, data.data() + 4 * i, 4);
      const uint16_t narrow = kernels::NarrowToBFloat16(wide);
      std::memcpy(data.data() + 2 * i, &narrow, 2);
    }
    data.resize(data.size() / 2);
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
      static const auto* const weights = new std::vector<const char*>{
          kWeights, ".index.json", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"};
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
