// info, check-upgrade, version: what the running daemon is, and what the installed one is.
#include <google/protobuf/struct.pb.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/commands.h"
#include "client/ctl/output.h"
#include "client/ctl/programs.h"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::ctl {
namespace {

std::string InfoText(const v1::ServerInfo& info) {
  return Table({{"version", info.version()},
                {"started", TimeText(info.start_time())},
                {"kernels", absl::StrCat(info.kernel_target(), ", ", info.worker_threads(), " workers")},
                {"memory", absl::StrCat(BytesText(info.memory_used_bytes()), " of ",
                                        BytesText(info.memory_budget_bytes()), " used")},
                {"optimizers", absl::StrCat(info.optimizers(), ", ", info.attachments(), " attached")},
                {"metrics",
                 info.metrics_address().empty() ? "off" : absl::StrCat("http://", info.metrics_address(), "/metrics")},
                {"descriptor socket", info.descriptor_socket()}});
}

// The versions of the records that a daemon's program reads.
struct RecordVersions {
  unsigned oldest = 0, newest = 0;
};

std::optional<RecordVersions> RecordVersionsOf(const std::string& program) {
  RecordVersions versions;
  const ChildResult said = RunChild({program, "--record_versions"}, "");
  if (said.status != 0 || std::sscanf(said.output.c_str(), "%u %u", &versions.oldest, &versions.newest) != 2) {
    return std::nullopt;
  }
  return versions;
}

// Whether `program` will recover every optimizer of the daemon that `running` describes.
absl::StatusOr<std::string> UpgradeText(const v1::ServerInfo& running, const std::string& program) {
  const std::optional<RecordVersions> known = RecordVersionsOf(program);
  if (!known) {
    return absl::UnavailableError(absl::StrCat(program,
                                               " does not say which records it reads; name a superoffloadd "
                                               "that knows --record_versions"));
  }
  const std::string reads = absl::StrCat(program, " reads records of versions ", known->oldest, " to ", known->newest);
  if (running.optimizers() == 0) return absl::StrCat(reads, "; the running daemon hosts no optimizer\n");
  bool all = running.record_versions_size() > 0;
  for (const uint32_t version : running.record_versions()) {
    all = all && version >= known->oldest && version <= known->newest;
  }
  const std::string has =
      running.record_versions().empty()
          ? std::string("does not tell its own")
          : absl::StrCat("has optimizers of version ", absl::StrJoin(running.record_versions(), ", "));
  if (all) return absl::StrCat(reads, "; the running daemon ", has, ": it will recover them\n");
  return absl::FailedPreconditionError(absl::StrCat(reads, ", and the running daemon ", running.version(), " ", has,
                                                    ": take checkpoints of its ", running.optimizers(),
                                                    " optimizers before you replace it, and restore them after"));
}

using Daemon = absl::StatusOr<v1::ServerInfo>;

std::string VersionText(const std::optional<RecordVersions>& known, const Daemon& daemon) {
  std::string text =
      absl::StrCat("superoffloadctl ", SUPEROFFLOAD_VERSION, ", wire version ", SUPEROFFLOAD_WIRE_VERSION, "\n");
  if (known) {
    absl::StrAppend(&text, "the installed daemon reads records of versions ", known->oldest, " to ", known->newest,
                    "\n");
  }
  if (!daemon.ok()) return absl::StrCat(text, "no daemon answers\n");
  return absl::StrCat(text, "the running daemon is ", daemon->version(), ", wire version ", daemon->wire_version(),
                      "\n");
}

std::string VersionJson(const std::optional<RecordVersions>& known, const Daemon& daemon) {
  google::protobuf::Struct all;
  auto& fields = *all.mutable_fields();
  fields["version"].set_string_value(SUPEROFFLOAD_VERSION);
  fields["wire_version"].set_number_value(SUPEROFFLOAD_WIRE_VERSION);
  if (known) {
    auto& range = *fields["reads_record_versions"].mutable_list_value();
    for (unsigned version = known->oldest; version <= known->newest; ++version) {
      range.add_values()->set_number_value(version);
    }
  }
  if (daemon.ok()) {
    auto& running = *fields["daemon"].mutable_struct_value()->mutable_fields();
    running["version"].set_string_value(daemon->version());
    running["wire_version"].set_number_value(daemon->wire_version());
    auto& records = *running["record_versions"].mutable_list_value();
    for (const uint32_t version : daemon->record_versions()) records.add_values()->set_number_value(version);
  }
  return JsonOf(all);
}

}  // namespace

absl::Status Info(Client& client, const Arguments& arguments) {
  return PrintAnswer(client.GetServerInfo(), arguments.json, InfoText);
}

absl::Status CheckUpgrade(Client& client, const Arguments& arguments) {
  absl::StatusOr<v1::ServerInfo> running = client.GetServerInfo();
  if (!running.ok()) return running.status();
  const absl::StatusOr<std::string> text =
      UpgradeText(*running, arguments.operands.empty() ? InstalledDaemon() : AbsolutePath(arguments.operands.front()));
  if (!text.ok()) return text.status();
  Print(*text);
  return absl::OkStatus();
}

int Version(const Arguments& arguments) {
  Daemon daemon = absl::UnavailableError("");
  if (absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(arguments.endpoint); client.ok()) {
    daemon = (*client)->GetServerInfo();
  }
  const std::optional<RecordVersions> known = RecordVersionsOf(InstalledDaemon());
  Print(arguments.json ? VersionJson(known, daemon) : VersionText(known, daemon));
  return 0;
}

}  // namespace superoffload::ctl
