#include "server/host/kept_descriptors.h"

#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/host/keeper_protocol.h"
#include "server/host/log.h"

namespace superoffload::host {

using memory::FileDescriptor;

bool KeptDescriptors::ReceiveAll(int link, DaemonWord& word) {
  for (;;) {
    switch (Receive(link, word)) {
      case Received::kMessage:
        break;
      case Received::kNothing:
        return true;
      case Received::kEnd:
        return false;
    }
  }
}

KeptDescriptors::Received KeptDescriptors::Receive(int link, DaemonWord& word) {
  char text[kMaxMessageBytes];
  iovec iov{text, sizeof(text)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxMessageFds * sizeof(int))];
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t received = ::recvmsg(link, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (received < 0) return errno == EAGAIN || errno == EINTR ? Received::kNothing : Received::kEnd;
  if (received == 0) return Received::kEnd;
  std::vector<FileDescriptor> fds;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
      fds.emplace_back(fd);
    }
  }
  Obey(std::string(text, static_cast<size_t>(received)), std::move(fds), (message.msg_flags & MSG_CTRUNC) != 0, word);
  return Received::kMessage;
}

void KeptDescriptors::Obey(const std::string& message, std::vector<FileDescriptor> fds, bool truncated,
                           DaemonWord& word) {
  std::string name;
  bool store = false, remove = false;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(message, '\n'))) {
    if (line.rfind("FDNAME=", 0) == 0) name = line.substr(7);
    store = store || line == "FDSTORE=1";
    remove = remove || line == "FDSTOREREMOVE=1";
    word.ready = word.ready || line == "READY=1";
    word.stopped = word.stopped || line == kStoppedMessage;
  }
  if (word.ready && name.empty() && fds.size() == 1) word.listener = std::move(fds.front());
  if (name.empty() || name.find(':') != std::string::npos) return;
  if (remove || store) Drop(name);
  if (!store) return;
  if (truncated) {
    LogError(absl::StrCat("the keeper has no descriptors left for ", name, ", which does not outlive the daemon now; ",
                          "raise its limit with ulimit -n"));
    return;
  }
  for (FileDescriptor& fd : fds) kept_.push_back({name, std::move(fd)});
}

bool KeptDescriptors::empty() const {
  return std::all_of(kept_.begin(), kept_.end(), [](const Kept& kept) { return kept.name == kSuccessionName; });
}

bool KeptDescriptors::Drop(const std::string& name) {
  return std::erase_if(kept_, [&](const Kept& kept) { return kept.name == name; }) > 0;
}

std::map<std::string, int64_t> KeptDescriptors::Bytes() const {
  std::map<std::string, int64_t> bytes;
  for (const Kept& kept : kept_) {
    if (kept.name == kSuccessionName) continue;
    struct stat file{};
    ::fstat(kept.fd.get(), &file);
    bytes[kept.name] += file.st_size;
  }
  return bytes;
}

std::string KeptDescriptors::Text() const {
  const std::map<std::string, int64_t> bytes = Bytes();
  if (bytes.empty()) return "nothing";
  const auto format = [](std::string* out, const auto& entry) {
    absl::StrAppend(out, entry.first, " (", entry.second, " bytes)");
  };
  return absl::StrCat("the memory of ", absl::StrJoin(bytes, ", ", format));
}

}  // namespace superoffload::host
