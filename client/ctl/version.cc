#include "client/ctl/version.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <cstdio>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/child.h"
#include "client/ctl/upgrade.h"
#include "superoffload/client.hpp"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::ctl {
namespace {

using Fields = google::protobuf::Map<std::string, google::protobuf::Value>;

void AddDaemon(Fields& fields, const v1::ServerInfo& info) {
  fields["version"].set_string_value(info.version());
  fields["wire_version"].set_number_value(info.wire_version());
  auto& records = *fields["record_versions"].mutable_list_value();
  for (const uint32_t version : info.record_versions()) records.add_values()->set_number_value(version);
}

}  // namespace

absl::Status RunVersion(const std::string& endpoint, bool json) {
  absl::StatusOr<v1::ServerInfo> daemon = absl::UnavailableError("");
  if (absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(endpoint); client.ok()) {
    daemon = (*client)->GetServerInfo();
  }
  unsigned oldest = 0, newest = 0;
  const ChildResult records = RunChild({InstalledDaemon(), "--record_versions"}, "");
  const bool known = records.status == 0 && std::sscanf(records.output.c_str(), "%u %u", &oldest, &newest) == 2;
  if (json) {
    google::protobuf::Struct all;
    Fields& fields = *all.mutable_fields();
    fields["version"].set_string_value(SUPEROFFLOAD_VERSION);
    fields["wire_version"].set_number_value(SUPEROFFLOAD_WIRE_VERSION);
    if (known) {
      auto& range = *fields["reads_record_versions"].mutable_list_value();
      for (unsigned version = oldest; version <= newest; ++version) range.add_values()->set_number_value(version);
    }
    if (daemon.ok()) AddDaemon(*fields["daemon"].mutable_struct_value()->mutable_fields(), *daemon);
    std::string text;
    (void)google::protobuf::util::MessageToJsonString(all, &text);
    std::printf("%s\n", text.c_str());
    return absl::OkStatus();
  }
  std::printf("superoffloadctl %s, wire version %u\n", SUPEROFFLOAD_VERSION, SUPEROFFLOAD_WIRE_VERSION);
  if (known) std::printf("the installed daemon reads records of versions %u to %u\n", oldest, newest);
  if (daemon.ok()) {
    std::printf("the running daemon is %s, wire version %u\n", daemon->version().c_str(), daemon->wire_version());
  } else {
    std::printf("no daemon answers\n");
  }
  return absl::OkStatus();
}

}  // namespace superoffload::ctl
