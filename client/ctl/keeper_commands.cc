// kept, drop-kept: asks the keeper beside the daemon's control socket.
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/ctl/commands.h"
#include "client/ctl/output.h"
#include "superoffload/v1/file_descriptor.h"
#include "superoffload/v1/keeper_socket.h"

namespace superoffload::ctl {
namespace {

// Beside the control socket.
absl::StatusOr<std::string> SocketOf(const std::string& endpoint) {
  absl::StatusOr<std::string> resolved = ResolveEndpoint(endpoint);
  if (!resolved.ok()) return resolved;
  absl::string_view path = *resolved;
  const size_t slash = path.rfind('/');
  if (!absl::ConsumePrefix(&path, "unix:") || slash == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("a keeper is reached on its own machine, beside unix:/path/control.sock, not at ", *resolved));
  }
  return absl::StrCat(resolved->substr(std::strlen("unix:"), slash + 1 - std::strlen("unix:")),
                      SUPEROFFLOAD_KEEPER_SOCKET);
}

// The lines of the answer after "OK".
absl::StatusOr<std::vector<std::string>> Ask(const std::string& endpoint, const std::string& request) {
  const absl::StatusOr<std::string> path = SocketOf(endpoint);
  if (!path.ok()) return path.status();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path->size() >= sizeof(address.sun_path) || request.size() > SUPEROFFLOAD_KEEPER_REQUEST_BYTES) {
    return absl::InvalidArgumentError("the endpoint or the name is too long");
  }
  std::memcpy(address.sun_path, path->c_str(), path->size() + 1);
  const FileDescriptor keeper(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(keeper.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::UnavailableError(absl::StrCat("no keeper answers at ", *path, ": ", std::strerror(errno),
                                               "; only superoffloadd --keeper has one"));
  }
  (void)::send(keeper.get(), request.data(), request.size(), MSG_NOSIGNAL);  // one that may not ask has its answer
  std::string answer;
  char part[4096];
  for (ssize_t bytes; (bytes = ::recv(keeper.get(), part, sizeof(part), 0)) > 0;) {
    answer.append(part, static_cast<size_t>(bytes));
  }
  std::vector<std::string> lines = absl::StrSplit(answer, '\n', absl::SkipEmpty());
  if (!lines.empty() && lines.front() == "OK") return std::vector<std::string>(lines.begin() + 1, lines.end());
  const std::pair<std::string, std::string> error =
      absl::StrSplit(lines.empty() ? "" : lines.front(), absl::MaxSplits(' ', 1));
  int code = 0;
  if (!absl::SimpleAtoi(error.first, &code) || code == 0) return absl::UnavailableError("the keeper did not answer");
  return absl::Status(static_cast<absl::StatusCode>(code), error.second);
}

std::string EntryOf(const v1::Optimizer& optimizer) {
  return absl::StrCat(SUPEROFFLOAD_KEEPER_ENTRY_PREFIX, optimizer.uid(), "-", optimizer.name());
}

// Their name, uid and memory_bytes. UNAVAILABLE: no keeper answers there.
absl::StatusOr<v1::ListOptimizersResponse> ListKept(const std::string& endpoint) {
  const absl::StatusOr<std::vector<std::string>> lines = Ask(endpoint, "LIST");
  if (!lines.ok()) return lines.status();
  v1::ListOptimizersResponse response;
  for (const std::string& line : *lines) {
    const std::pair<std::string, std::string> bytes_and_name = absl::StrSplit(line, absl::MaxSplits(' ', 1));
    absl::string_view name = bytes_and_name.second;
    uint64_t bytes = 0;
    uint32_t uid = 0;
    const std::pair<absl::string_view, absl::string_view> uid_and_name =
        absl::StrSplit(absl::StripPrefix(name, SUPEROFFLOAD_KEEPER_ENTRY_PREFIX), absl::MaxSplits('-', 1));
    if (!absl::SimpleAtoi(bytes_and_name.first, &bytes) || !absl::StartsWith(name, SUPEROFFLOAD_KEEPER_ENTRY_PREFIX) ||
        !absl::SimpleAtoi(uid_and_name.first, &uid)) {
      continue;
    }
    v1::Optimizer& optimizer = *response.add_optimizers();
    optimizer.set_name(std::string(uid_and_name.second));
    optimizer.set_uid(uid);
    optimizer.set_memory_bytes(bytes);
  }
  return response;
}

// Frees one, NAME or UID/NAME. FAILED_PRECONDITION: a daemon runs, or several users have one of that name.
absl::Status Drop(const std::string& endpoint, const std::string& name, std::optional<uint32_t> uid) {
  const absl::StatusOr<v1::ListOptimizersResponse> kept = ListKept(endpoint);
  if (!kept.ok()) return kept.status();
  std::vector<v1::Optimizer> matches;
  for (const v1::Optimizer& optimizer : kept->optimizers()) {
    const bool qualified = absl::StrCat(optimizer.uid(), "/", optimizer.name()) == name;
    if (qualified || (optimizer.name() == name && (!uid || *uid == optimizer.uid()))) matches.push_back(optimizer);
  }
  if (matches.empty()) return absl::NotFoundError(absl::StrCat("the keeper keeps no optimizer \"", name, "\""));
  if (matches.size() > 1) {
    const auto owner = [](std::string* out, const v1::Optimizer& optimizer) { absl::StrAppend(out, optimizer.uid()); };
    return absl::FailedPreconditionError(absl::StrCat("the users ", absl::StrJoin(matches, ", ", owner),
                                                      " have an optimizer \"", name, "\"; say whose with --uid"));
  }
  return Ask(endpoint, absl::StrCat("DROP ", EntryOf(matches.front()))).status();
}

std::string KeptText(const v1::ListOptimizersResponse& response) {
  std::vector<Row> rows{{"NAME", "UID", "MEMORY"}};
  for (const v1::Optimizer& o : response.optimizers()) {
    rows.push_back({o.name(), absl::StrCat(o.uid()), BytesText(o.memory_bytes())});
  }
  return Table(rows);
}

}  // namespace

int Kept(const Arguments& arguments) {
  return ExitStatus(PrintAnswer(ListKept(arguments.endpoint), arguments.json, KeptText));
}

int DropKept(const Arguments& arguments) {
  return ExitStatus(Drop(arguments.endpoint, arguments.operands[0], arguments.uid));
}

}  // namespace superoffload::ctl
