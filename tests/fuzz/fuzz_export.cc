// The whole of export over a directory that anybody may have made: it writes a model directory that inspects as tensors
// of the dtype that was asked for, or says why not and leaves nothing.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "server/checkpoint/export_model.h"
#include "server/checkpoint/saved_tensors.h"
#include "tests/fuzz/checkpoint_directory.h"

using namespace superoffload;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fuzz::CheckpointDirectory directory;
  if (size == 0) return 0;
  directory.Fill(data + 1, size - 1);
  checkpoint::ExportOptions options{.checkpoint = directory.checkpoint(), .target = directory.model()};
  options.dtype = (data[0] & 1) != 0 ? "F32" : "BF16";
  options.shard_bytes = (data[0] & 2) != 0 ? 1 : options.shard_bytes;
  // As its own source: tensors of any dtype, some of them tied.
  if ((data[0] & 4) != 0) {
    options.source = (data[0] & 8) != 0 ? directory.checkpoint() : directory.checkpoint() + "/rank-00000-of-00002";
  }
  const absl::StatusOr<checkpoint::ExportReport> report = checkpoint::ExportModel(options);
  if (!report.ok()) {
    if (report.status().message().empty() || std::filesystem::exists(directory.model())) std::abort();
    return 0;
  }
  uint64_t tensors = 0, bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory.model())) {
    if (entry.path().extension() != ".safetensors") continue;
    checkpoint::SavedTensors saved;
    if (!saved.AddFile(entry.path(), 0).ok()) std::abort();
    tensors += saved.slices().size();
    for (const auto& [name, slices] : saved.slices()) {
      bytes += slices.front().box.Elements() * checkpoint::DTypeBytes(slices.front().dtype);
    }
  }
  if (tensors != report->tensors + report->tied + report->copied || bytes != report->bytes) std::abort();
  return 0;
}
