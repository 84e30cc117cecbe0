#include "server/checkpoint/command.h"

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "server/checkpoint/export_model.h"
#include "server/checkpoint/inspect.h"
#include "superoffload/v1/printable.h"

ABSL_FLAG(std::string, inspect_checkpoint, "",
          "say what is in this checkpoint, and exit; superoffloadctl inspect asks so");
ABSL_FLAG(bool, json, false, "--inspect_checkpoint: print one JSON object");
ABSL_FLAG(bool, verify, false, "--inspect_checkpoint: read all files and compare their checksums");
ABSL_FLAG(
    std::string, export_checkpoint, "",
    "write the weights of this checkpoint as a Hugging Face model directory, and exit; superoffloadctl export asks so");
ABSL_FLAG(std::string, export_to, "", "--export_checkpoint: the directory to write; it must not exist");
ABSL_FLAG(std::string, export_source, "",
          "--export_checkpoint: a model directory whose other files, and tensors that were not trained, are copied");
ABSL_FLAG(std::string, export_dtype, "bf16", "--export_checkpoint: bf16 or fp32");
ABSL_FLAG(uint64_t, export_shard_bytes, uint64_t{5} << 30, "--export_checkpoint: most bytes of a file");

namespace superoffload::checkpoint {
namespace {

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "superoffloadd: %s: %s\n", absl::StatusCodeToString(status.code()).c_str(),
               Printable(std::string(status.message())).c_str());
  return 1;
}

int Inspect(const std::string& directory) {
  const absl::StatusOr<Inspection> found = InspectCheckpoint(directory, absl::GetFlag(FLAGS_verify));
  if (!found.ok()) return Fail(found.status());
  std::fputs((absl::GetFlag(FLAGS_json) ? found->json : found->text).c_str(), stdout);
  return found->whole ? 0 : 1;
}

int Export(const std::string& directory) {
  const std::string dtype = absl::GetFlag(FLAGS_export_dtype);
  const absl::StatusOr<ExportReport> report = ExportModel({.checkpoint = directory,
                                                           .target = absl::GetFlag(FLAGS_export_to),
                                                           .source = absl::GetFlag(FLAGS_export_source),
                                                           .dtype = dtype == "bf16"   ? "BF16"
                                                                    : dtype == "fp32" ? "F32"
                                                                                      : dtype,
                                                           .shard_bytes = absl::GetFlag(FLAGS_export_shard_bytes)});
  if (!report.ok()) return Fail(report.status());
  absl::PrintF("step %d: %d trained tensors, %d tied to them, %d copied; %d files, %d bytes, in %s\n",
               report->committed_steps, report->tensors, report->tied, report->copied, report->files, report->bytes,
               absl::GetFlag(FLAGS_export_to));
  return 0;
}

}  // namespace

std::optional<int> RunCheckpointCommand() {
  if (const std::string path = absl::GetFlag(FLAGS_inspect_checkpoint); !path.empty()) return Inspect(path);
  if (const std::string path = absl::GetFlag(FLAGS_export_checkpoint); !path.empty()) return Export(path);
  return std::nullopt;
}

}  // namespace superoffload::checkpoint
