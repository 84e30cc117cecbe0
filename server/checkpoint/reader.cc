#include "server/checkpoint/reader.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/checkpoint/files.h"
#include "server/checkpoint/index.h"
#include "server/checkpoint/safetensors.h"
#include "server/memory/crc32.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr size_t kReadBytes = size_t{16} << 20;

absl::StatusOr<std::string> ReadText(const std::string& path, uint64_t max_bytes) {
  absl::StatusOr<File> file = File::Open(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<uint64_t> bytes = file->Bytes();
  if (!bytes.ok()) return bytes.status();
  if (*bytes > max_bytes) return absl::DataLossError(absl::StrCat(path, " has ", *bytes, " bytes, too many"));
  std::string text(*bytes, '\0');
  if (absl::Status status = file->ReadAt(0, text.data(), text.size()); !status.ok()) return status;
  return text;
}

// The status of a failed step, with the place where it failed before its message.
absl::Status In(const std::string& where, const absl::Status& status) {
  return {status.code(), absl::StrCat(where, ": ", status.message())};
}

// Where the elements of a tensor lie.
struct Source {
  const File* file;
  uint64_t offset;
  std::vector<uint64_t> shape;
  std::string dtype;
};

class Reader {
 public:
  absl::Status Open(const std::vector<std::string>& directories) {
    if (directories.empty()) return absl::InvalidArgumentError("directories is empty; name the checkpoint's directory");
    for (const std::string& directory : directories) {
      if (absl::Status status = OpenDirectory(directory); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Finds every tensor of the optimizer.
  absl::Status Match(const engine::OptimizerSpec& spec) {
    moment_.groups = spec.groups;
    for (const engine::ParameterSpec& parameter : spec.parameters) {
      std::array<const Source*, kArrays.size()>& sources = sources_.emplace_back();
      for (size_t array = 0; array < kArrays.size(); ++array) {
        const std::string name = absl::StrCat(kArrays[array], ".", parameter.name);
        const auto found = tensors_.find(name);
        if (found == tensors_.end()) {
          return absl::FailedPreconditionError(
              absl::StrCat("the checkpoint has no tensor \"", name,
                           "\"; restore into an optimizer with the parameters of the one "
                           "that was saved, and name the directories of all its ranks"));
        }
        const Source& source = found->second;
        if (source.shape != parameter.shape || source.dtype != "F32") {
          return absl::FailedPreconditionError(absl::StrCat(
              "tensor \"", name, "\" is ", source.dtype, " [", absl::StrJoin(source.shape, ", "),
              "] in the checkpoint but F32 [", absl::StrJoin(parameter.shape, ", "), "] in the optimizer"));
        }
        sources[array] = &source;
      }
      const auto group = groups_.find(parameter.name);
      if (group == groups_.end()) continue;
      const kernels::WeightDecay form = moment_.groups[parameter.group].decay_form;  // Adam stays Adam
      moment_.groups[parameter.group] = group->second;
      moment_.groups[parameter.group].decay_form = form;
    }
    for (const kernels::AdamHyperparameters& group : moment_.groups) {
      if (absl::Status status = engine::ValidateHyperparameters(group); !status.ok()) {
        return absl::DataLossError(absl::StrCat("the checkpoint's hyper-parameters are damaged: ", status.message()));
      }
    }
    return absl::OkStatus();
  }

  // Compares every file with its checksum.
  absl::Status Verify() const {
    std::vector<char> buffer(kReadBytes);
    for (const auto& [path, expected] : crc32_) {
      const File& file = *files_.at(path);
      absl::StatusOr<uint64_t> bytes = file.Bytes();
      if (!bytes.ok()) return bytes.status();
      uint32_t crc32 = 0;
      for (uint64_t at = 0; at < *bytes; at += kReadBytes) {
        const size_t count = static_cast<size_t>(std::min<uint64_t>(kReadBytes, *bytes - at));
        if (absl::Status status = file.ReadAt(at, buffer.data(), count); !status.ok()) return status;
        crc32 = memory::Crc32(buffer.data(), count, crc32);
      }
      if (crc32 != expected) {
        return absl::DataLossError(
            absl::StrCat(path, " is damaged: its CRC-32 is not that of its index; restore an earlier checkpoint"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Load(const optimizer::HostedOptimizer& optimizer) const {
    const engine::Layout& layout = optimizer.layout();
    for (size_t p = 0; p < sources_.size(); ++p) {
      const size_t bytes = engine::ElementCount(optimizer.spec().parameters[p]) * sizeof(float);
      for (size_t array = 0; array < kArrays.size(); ++array) {
        std::byte* const to = optimizer.memory().state.data() + layout.state_array_offsets[array] +
                              layout.placements[p].state_offset * sizeof(float);
        const Source& source = *sources_[p][array];
        if (absl::Status status = source.file->ReadAt(source.offset, to, bytes); !status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  const engine::StepEngine::Moment& moment() const { return moment_; }

  // Of the checkpoint of an optimizer of this name; 0 when there is none, or it does not know.
  uint64_t RunOf(const std::string& optimizer) const {
    const auto found = runs_.find(optimizer);
    return found == runs_.end() ? 0 : found->second;
  }

 private:
  absl::Status OpenDirectory(const fs::path& directory) {
    if (!directory.is_absolute()) {
      return absl::InvalidArgumentError(
          absl::StrCat("directories: \"", directory.string(), "\" must be an absolute path"));
    }
    absl::StatusOr<std::string> text = ReadText(directory / kIndexFile, kMaxIndexBytes);
    if (!text.ok()) return text.status();
    absl::StatusOr<Index> index = ParseIndex(*text);
    if (!index.ok()) return In(directory, index.status());
    uint64_t& committed_steps = moment_.statistics.committed_steps;
    if (!files_.empty() && committed_steps != index->committed_steps) {
      return absl::InvalidArgumentError(absl::StrCat("directories: ", directory.string(), " is of step ",
                                                     index->committed_steps, " but another is of step ",
                                                     committed_steps, "; name checkpoints of one step"));
    }
    committed_steps = index->committed_steps;
    runs_[index->optimizer] = index->run;
    for (const auto& [parameter, group] : index->parameter_groups) groups_[parameter] = index->groups[group];
    for (const auto& [tensor, file] : index->tensor_files) {
      if (absl::Status status = OpenFile(directory / file); !status.ok()) return status;
    }
    for (const auto& [file, crc32] : index->file_crc32) {
      if (files_.contains(directory / file)) crc32_[directory / file] = crc32;
    }
    return absl::OkStatus();
  }

  absl::Status OpenFile(const std::string& path) {
    if (files_.contains(path)) return absl::OkStatus();
    absl::StatusOr<File> opened = File::Open(path);
    if (!opened.ok()) return opened.status();
    const File& file = *files_.emplace(path, std::make_unique<File>(*std::move(opened))).first->second;
    absl::StatusOr<uint64_t> bytes = file.Bytes();
    if (!bytes.ok()) return bytes.status();
    std::string text(kSafetensorsLengthBytes, '\0');
    if (absl::Status status = file.ReadAt(0, text.data(), text.size()); !status.ok()) return status;
    absl::StatusOr<uint64_t> length = ParseSafetensorsLength(text, *bytes);
    if (!length.ok()) return In(path, length.status());
    text.resize(*length);
    if (absl::Status status = file.ReadAt(kSafetensorsLengthBytes, text.data(), text.size()); !status.ok()) {
      return status;
    }
    const uint64_t data_offset = kSafetensorsLengthBytes + *length;
    absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(text, *bytes - data_offset);
    if (!header.ok()) return In(path, header.status());
    for (SafetensorsTensor& tensor : header->tensors) {
      tensors_[tensor.name] = {&file, data_offset + tensor.begin, std::move(tensor.shape), std::move(tensor.dtype)};
    }
    return absl::OkStatus();
  }

  engine::StepEngine::Moment moment_;
  std::map<std::string, uint64_t> runs_;                            // by optimizer
  std::map<std::string, std::unique_ptr<File>> files_;              // by path
  std::map<std::string, uint32_t> crc32_;                           // by path
  std::map<std::string, Source> tensors_;                           // by name
  std::map<std::string, kernels::AdamHyperparameters> groups_;      // by parameter name
  std::vector<std::array<const Source*, kArrays.size()>> sources_;  // per parameter
};

}  // namespace

absl::StatusOr<Index> ReadIndex(const std::string& directory) {
  absl::StatusOr<std::string> text = ReadText(absl::StrCat(directory, "/", kIndexFile), kMaxIndexBytes);
  if (!text.ok()) return text.status();
  return ParseIndex(*text);
}

absl::Status RestoreCheckpoint(optimizer::HostedOptimizer& optimizer, const optimizer::AttachmentInfo& restorer,
                               const std::vector<std::string>& directories) {
  Reader reader;
  if (absl::Status status = reader.Open(directories); !status.ok()) return status;
  if (absl::Status status = reader.Match(optimizer.spec()); !status.ok()) return status;
  if (absl::Status status = reader.Verify(); !status.ok()) return status;
  const absl::Status status = optimizer.Restore(restorer, reader.moment(), [&] { return reader.Load(optimizer); });
  if (const uint64_t run = reader.RunOf(optimizer.id().name); status.ok() && run != 0) optimizer.set_run(run);
  return status;
}

}  // namespace superoffload::checkpoint
