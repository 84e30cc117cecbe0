#include "server/host/keeper_link.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "server/host/keeper_protocol.h"
#include "server/host/log.h"
#include "server/host/own_program.h"

namespace superoffload::host {
namespace {

using memory::FileDescriptor;

constexpr int kKeepersSocket = 3;  // in the keeper
constexpr absl::Duration kPause = absl::Milliseconds(100);
constexpr absl::Duration kKeeperEndTime = absl::Seconds(1);  // between a socket's end and its process's

std::string KeepText(const std::string& name) { return absl::StrCat("FDSTORE=1\nFDNAME=", name); }

// This process's command line as a keeper's: without the word that made it the daemon.
std::vector<std::string> KeepersCommand() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string line{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> words = absl::StrSplit(line, '\0');
  if (!words.empty() && words.back().empty()) words.pop_back();
  if (!words.empty() && words.back() == "--nokeeper") words.pop_back();
  return words;
}

void Bury(pid_t keeper) {
  const absl::Time deadline = absl::Now() + kKeeperEndTime;
  while (::waitpid(keeper, nullptr, WNOHANG) == 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
}

// 0: it could not be started. Unlike the daemon's threads it blocks no signal.
pid_t StartKeeper(int socket) {
  std::vector<std::string> words = KeepersCommand();
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  std::string taken_over = absl::StrCat(kTakenOverDaemonVariable, "=", kKeepersSocket, ":", ::getpid());
  std::vector<char*> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) environment.push_back(*variable);
  environment.push_back(taken_over.data());
  environment.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, socket, kKeepersSocket);
  ::posix_spawnattr_init(&attributes);
  sigset_t none, defaults;
  sigemptyset(&none);
  sigemptyset(&defaults);
  for (int signal : {SIGPIPE, SIGXFSZ}) sigaddset(&defaults, signal);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &defaults);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t keeper = 0;
  const int error =
      ::posix_spawn(&keeper, OwnProgram().c_str(), &actions, &attributes, arguments.data(), environment.data());
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error == 0) return keeper;
  LogError(absl::StrCat("cannot start a keeper: ", std::strerror(error)));
  return 0;
}

}  // namespace

KeeperLink::KeeperLink(FileDescriptor socket, std::map<std::string, std::vector<int>> kept)
    : wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      socket_(std::move(socket)),
      kept_(std::move(kept)),
      thread_([this] { Run(); }) {
  pthread_setname_np(thread_.native_handle(), "so-keeper");
}

KeeperLink::~KeeperLink() {
  {
    absl::MutexLock lock(&mu_);
    ending_ = stopping_ = true;
  }
  Wake();
  thread_.join();
}

void KeeperLink::Wake() {
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
}

void KeeperLink::Ready(FileDescriptor listener) {
  absl::MutexLock lock(&mu_);
  ready_ = true;
  listener_ = std::move(listener);
  Post({"READY=1", "", /*with_listener=*/listener_.valid()});
}

void KeeperLink::Keep(const std::string& name, const std::vector<int>& fds) {
  absl::MutexLock lock(&mu_);
  kept_[name] = fds;
  Post({KeepText(name), name});
}

void KeeperLink::Drop(const std::string& name) {
  absl::MutexLock lock(&mu_);
  kept_.erase(name);
  std::erase_if(queue_, [&](const Message& message) { return message.name == name; });
  Post({absl::StrCat("FDSTOREREMOVE=1\nFDNAME=", name), ""});
}

void KeeperLink::Stop() {
  absl::MutexLock lock(&mu_);
  stopping_ = true;
  kept_.clear();
  std::erase_if(queue_, [](const Message& message) { return !message.name.empty(); });
}

void KeeperLink::Stopped() {
  absl::MutexLock lock(&mu_);
  Post({kStoppedMessage, ""});
}

void KeeperLink::Post(Message message) {
  if (queue_.empty() && Send(message)) return;
  if (queue_.empty()) {
    LogWarning(absl::StrCat(refusal_ == 0
                                ? "the keeper reads no messages"
                                : absl::StrCat("the keeper cannot be given memory (", std::strerror(refusal_), ")"),
                            "; until that is over, what is created now does not outlive the daemon"));
  }
  queue_.push_back(std::move(message));
  Wake();
}

std::vector<int> KeeperLink::DescriptorsOf(const Message& message) const {
  if (message.with_listener) return {listener_.get()};
  return message.name.empty() ? std::vector<int>{} : kept_.at(message.name);
}

bool KeeperLink::Send(const Message& message) {
  iovec iov{const_cast<char*>(message.text.data()), message.text.size()};
  msghdr header{};
  header.msg_iov = &iov;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxMessageFds * sizeof(int))] = {};
  if (const std::vector<int> fds = DescriptorsOf(message); !fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* const ancillary = CMSG_FIRSTHDR(&header);
    ancillary->cmsg_level = SOL_SOCKET;
    ancillary->cmsg_type = SCM_RIGHTS;
    ancillary->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(ancillary), fds.data(), fds.size() * sizeof(int));
  }
  const bool sent = ::sendmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
  refusal_ = sent || errno == EAGAIN ? 0 : errno;
  return sent;  // else it is full, the keeper is gone, or the kernel passes no descriptors; the thread sees to each
}

void KeeperLink::SendQueued() {
  while (!queue_.empty() && Send(queue_.front())) queue_.pop_front();
}

void KeeperLink::Run() {
  for (;;) {
    pollfd polled[2] = {{wake_.get(), POLLIN, 0}, {-1, POLLIN, 0}};
    bool refused;
    {
      absl::MutexLock lock(&mu_);
      if (ending_) return;
      polled[1].fd = socket_.get();
      refused = !queue_.empty() && refusal_ != 0;  // although the socket has room
      if (!queue_.empty() && !refused) polled[1].events |= POLLOUT;
    }
    const bool alone = polled[1].fd < 0;  // no keeper could be started
    const int ready = ::poll(polled, 2, alone || refused ? static_cast<int>(absl::ToInt64Milliseconds(kPause)) : -1);
    if (ready < 0) continue;
    uint64_t count;
    (void)!::read(wake_.get(), &count, sizeof(count));
    if (alone || (polled[1].revents & (POLLHUP | POLLERR)) != 0) {
      Replace();
    } else if (refused || (polled[1].revents & POLLOUT) != 0) {
      absl::MutexLock lock(&mu_);
      SendQueued();
    }
  }
}

void KeeperLink::Replace() {
  if (const pid_t dead = std::exchange(keeper_, 0); dead > 0) Bury(dead);
  absl::MutexLock lock(&mu_);
  socket_ = FileDescriptor();
  if (stopping_) return;
  LogWarning(absl::StrCat("the keeper was killed; another one gets the memory of ",
                          kept_.size() - kept_.count(kSuccessionName), " optimizers"));
  const auto ending = [this] {
    mu_.AssertHeld();
    return ending_;
  };
  if (absl::Now() - replaced_ < kPause && mu_.AwaitWithTimeout(absl::Condition(&ending), kPause)) return;
  replaced_ = absl::Now();
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) return;
  const FileDescriptor keepers(pair[1]);
  socket_ = FileDescriptor(pair[0]);
  keeper_ = StartKeeper(keepers.get());
  queue_.clear();
  if (ready_) queue_.push_back({"READY=1", "", /*with_listener=*/listener_.valid()});
  for (const auto& [name, fds] : kept_) queue_.push_back({KeepText(name), name});
  SendQueued();
}

}  // namespace superoffload::host
