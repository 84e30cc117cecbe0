// checkpoint, restore, export, inspect.
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/commands.h"
#include "client/ctl/output.h"
#include "client/ctl/programs.h"
#include "superoffload/v1/printable.h"

namespace superoffload::ctl {
namespace {

std::string ExportText(const v1::ExportOptimizerResponse& response) {
  const std::string what =
      absl::StrCat(BytesText(response.bytes_written()), " in ", Printable(response.directory()), "\n");
  if (response.doubts().empty()) {
    return absl::StrCat("exact checkpoint of step ", response.committed_steps(), ", ", what);
  }
  return absl::StrCat("NOT GUARANTEED, ", what, Printable(response.doubts()), "\n");
}

std::string CheckpointText(const v1::CheckpointProgress& p) {
  return absl::StrFormat("step %d, %s, in %s%s\n", p.committed_steps(), BytesText(p.bytes_written()),
                         Printable(p.directory()), p.run_whole() ? ", which all ranks have written" : "");
}

std::string ProgressText(const v1::CheckpointProgress& p) {
  if (p.bytes_total() == 0) return "waiting for the end of the step";
  return absl::StrFormat("%s of %s written", BytesText(p.bytes_written()), BytesText(p.bytes_total()));
}

std::string RestoredText(const v1::Optimizer& o) {
  std::string text = absl::StrFormat("optimizer \"%s\" is restored to step %d\n", o.name(), o.committed_steps());
  if (o.blocks_rounded() > 0) {
    absl::StrAppendFormat(
        &text,
        "%d blocks of codes were saved in another dtype, or by ranks that cut them elsewhere, and are "
        "rounded anew\n",
        o.blocks_rounded());
  }
  if (o.tensors_converted() > 0) {
    absl::StrAppendFormat(&text, "%d tensors of moments were saved in another dtype, and are converted\n",
                          o.tensors_converted());
  }
  return text;
}

std::string AbsoluteWithoutSlash(const std::string& path) {
  std::string absolute = AbsolutePath(path);
  if (absolute.size() > 1 && absolute.back() == '/') absolute.pop_back();
  return absolute;
}

int RunDaemonProgram(std::vector<std::string> flags) {
  const std::string program = DaemonProgram();
  flags.insert(flags.begin(), program);
  const ChildResult child = RunChild(std::move(flags), "");
  std::fwrite(child.output.data(), 1, child.output.size(), stdout);
  if (child.status < 0) {
    std::fprintf(stderr,
                 "superoffloadctl: cannot run %s; install superoffloadd beside superoffloadctl, or point "
                 "$SUPEROFFLOAD_DAEMON at it\n",
                 program.c_str());
    return 1;
  }
  return std::fflush(stdout) == 0 ? child.status : 1;
}

}  // namespace

absl::Status Checkpoint(Client& client, const Arguments& arguments) {
  absl::StatusOr<v1::Optimizer> optimizer = client.GetOptimizer(arguments.name());
  if (!optimizer.ok()) return optimizer.status();
  if (optimizer->has_member() && arguments.step == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "optimizer \"", optimizer->name(), "\" is rank ", optimizer->member().rank(), " of ",
        optimizer->member().ranks(), " of run \"", optimizer->member().run(), "\", at step ",
        optimizer->committed_steps(), "; give --step=N, a later one, and the same directory on all ranks"));
  }
  const bool live = !arguments.json && ::isatty(STDERR_FILENO) != 0;
  absl::StatusOr<v1::CheckpointProgress> progress = client.CheckpointOptimizer(
      arguments.name(), AbsolutePath(arguments.operands[1]),
      [live](const v1::CheckpointProgress& now) {
        if (live) std::fprintf(stderr, "\r%s", ProgressText(now).c_str());
        return true;
      },
      arguments.step == 0 ? std::nullopt : std::optional<uint64_t>(arguments.step));
  if (live) std::fprintf(stderr, "\n");
  return PrintAnswer(progress, arguments.json, CheckpointText);
}

absl::Status ExportDamaged(Client& client, const Arguments& arguments) {
  return PrintAnswer(client.ExportOptimizer(arguments.name(), AbsolutePath(arguments.operands[1])), arguments.json,
                     ExportText);
}

absl::Status Restore(Client& client, const Arguments& arguments) {
  std::vector<std::string> directories;
  for (size_t i = 1; i < arguments.operands.size(); ++i) directories.push_back(AbsolutePath(arguments.operands[i]));
  return PrintAnswer(client.RestoreOptimizer(arguments.name(), directories), arguments.json, RestoredText);
}

int Inspect(const Arguments& arguments) {
  return RunDaemonProgram({absl::StrCat("--inspect_checkpoint=", AbsoluteWithoutSlash(arguments.operands[0])),
                           arguments.json ? "--json" : "--nojson", arguments.verify ? "--verify" : "--noverify"});
}

int ExportModel(const Arguments& arguments) {
  std::vector<std::string> flags{absl::StrCat("--export_checkpoint=", AbsoluteWithoutSlash(arguments.operands[0])),
                                 absl::StrCat("--export_to=", AbsoluteWithoutSlash(arguments.operands[1])),
                                 absl::StrCat("--export_dtype=", arguments.dtype),
                                 absl::StrCat("--export_shard_bytes=", arguments.shard_bytes)};
  if (!arguments.source.empty()) {
    flags.push_back(absl::StrCat("--export_source=", AbsoluteWithoutSlash(arguments.source)));
  }
  return RunDaemonProgram(std::move(flags));
}

}  // namespace superoffload::ctl
