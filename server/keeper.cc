#include "server/keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "server/keeper_protocol.h"
#include "server/log.h"
#include "server/memory/shared_memory.h"

namespace superoffload {
namespace {

using memory::FileDescriptor;

constexpr int kFirstListenFd = 3;  // SD_LISTEN_FDS_START
constexpr int kCannotStart = 126;  // exit status of a child that did not become the daemon
constexpr absl::Duration kShortLife = absl::Seconds(1);
constexpr absl::Duration kShortestPause = absl::Milliseconds(50);
constexpr absl::Duration kLongestPause = absl::Seconds(30);
constexpr absl::Duration kEndTime = absl::Seconds(5);  // between a socket's end and its process's

struct Kept {
  std::string name;
  FileDescriptor fd;
};

// Gives the descriptors `from` the numbers from `first` on, to be inherited. Needs one number more than they are.
bool Arrange(std::vector<int> from, int first) {
  for (size_t i = 0; i < from.size(); ++i) {
    const int target = first + static_cast<int>(i);
    if (from[i] == target) {
      if (::fcntl(target, F_SETFD, 0) != 0) return false;
      continue;
    }
    if (const auto taken = std::find(from.begin() + static_cast<ptrdiff_t>(i) + 1, from.end(), target);
        taken != from.end()) {
      *taken = ::fcntl(target, F_DUPFD_CLOEXEC, first);
      if (*taken < 0) return false;
    }
    if (::dup2(from[i], target) < 0) return false;
    ::close(from[i]);
  }
  return true;
}

class Keeper {
 public:
  explicit Keeper(const std::vector<std::string>& command) : command_(command) {}

  int Run() {
    if (!ReceiveSignals()) {
      LogError(absl::StrCat("the keeper cannot receive signals: ", std::strerror(errno)));
      return 1;
    }
    bool running = Adopt();
    for (;;) {
      const absl::Time start = absl::Now();
      if (!running) running = Start();
      if (running) {
        ready_ = false;
        Watch();
        running = false;
        if (stopped_) return 0;
        if (stopping_) return WIFSIGNALED(status_) && WTERMSIG(status_) == SIGTERM ? 0 : 1;  // met before it listened
        if (WIFEXITED(status_) && kept_.empty()) return WEXITSTATUS(status_);  // nothing is lost
      }
      failures_ = ready_ ? 0 : failures_ + 1;
      const absl::Duration pause = std::min(kLongestPause, kShortestPause * (int64_t{1} << std::min(failures_, 10)));
      LogWarning(absl::StrCat(Obituary(), "; it is started again", failures_ > 1 ? absl::StrCat(" in ", absl::FormatDuration(pause)) : "",
                              " with ", KeptText()));
      if ((failures_ > 0 || absl::Now() - start < kShortLife) && !Pause(pause)) return 1;
    }
  }

 private:
  bool ReceiveSignals() {
    sigset_t signals;
    sigemptyset(&signals);
    for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGCHLD}) sigaddset(&signals, signal);
    if (::sigprocmask(SIG_BLOCK, &signals, &old_signals_) != 0) return false;
    signals_ = FileDescriptor(::signalfd(-1, &signals, SFD_CLOEXEC));
    return signals_.valid();
  }

  // The daemon that has started this keeper in the place of one that was killed, if there is one.
  bool Adopt() {
    const char* const adopted = std::getenv(kAdoptedDaemonVariable);
    int socket = -1;
    if (adopted == nullptr || std::sscanf(adopted, "%d:%d", &socket, &daemon_) != 2) return false;
    ::unsetenv(kAdoptedDaemonVariable);
    ::fcntl(socket, F_SETFD, FD_CLOEXEC);
    link_ = FileDescriptor(socket);
    return true;
  }

  bool Start() {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
      LogError(absl::StrCat("the keeper cannot make a socket: ", std::strerror(errno)));
      return false;
    }
    link_ = FileDescriptor(pair[0]);
    const FileDescriptor daemons(pair[1]);
    daemon_ = ::fork();
    if (daemon_ == 0) Become(daemons.get());
    if (daemon_ < 0) LogError(absl::StrCat("the keeper cannot start a process: ", std::strerror(errno)));
    own_child_ = true;
    return daemon_ > 0;
  }

  // In the child.
  [[noreturn]] void Become(int socket) {
    ::sigprocmask(SIG_SETMASK, &old_signals_, nullptr);
    std::vector<std::string> names;
    std::vector<int> fds;
    for (const Kept& kept : kept_) {
      names.push_back(kept.name);
      fds.push_back(kept.fd.get());
    }
    fds.push_back(socket);
    if (!Arrange(fds, kFirstListenFd)) {
      LogError(absl::StrCat("the keeper cannot hand ", fds.size(), " descriptors over: ", std::strerror(errno),
                            "; raise its limit with ulimit -n"));
      ::_exit(kCannotStart);
    }
    ::unsetenv("NOTIFY_SOCKET");
    ::setenv(kKeeperSocketVariable, absl::StrCat(kFirstListenFd + names.size()).c_str(), 1);
    ::setenv("LISTEN_PID", std::to_string(::getpid()).c_str(), 1);
    ::setenv("LISTEN_FDS", std::to_string(names.size()).c_str(), 1);
    ::setenv("LISTEN_FDNAMES", absl::StrJoin(names, ":").c_str(), 1);
    std::vector<char*> arguments;
    for (const std::string& word : command_) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    ::execv(arguments[0], arguments.data());
    LogError(absl::StrCat("the keeper cannot run ", command_[0], ": ", std::strerror(errno)));
    ::_exit(kCannotStart);
  }

  // Serves the daemon until it has ended.
  void Watch() {
    for (bool ended = false; !ended;) {
      std::array<pollfd, 2> polled{pollfd{link_.get(), POLLIN, 0}, pollfd{signals_.get(), POLLIN, 0}};
      if (::poll(polled.data(), polled.size(), -1) < 0) continue;
      if (polled[1].revents != 0) ended = OnSignal();
      if (polled[0].revents != 0 && !ReceiveAll()) {
        link_ = FileDescriptor();  // whoever dies closes it; poll ignores it from here on
        if (!own_child_) ended = AwaitAdopted();
      }
    }
    if (link_.valid()) ReceiveAll();  // what it said before it died
    link_ = FileDescriptor();
  }

  // Returns whether the daemon has ended.
  bool OnSignal() {
    signalfd_siginfo info;
    if (::read(signals_.get(), &info, sizeof(info)) != sizeof(info)) return false;
    if (info.ssi_signo == SIGCHLD) return own_child_ && ::waitpid(daemon_, &status_, WNOHANG) == daemon_;
    if (info.ssi_signo != SIGHUP) stopping_ = true;
    ::kill(daemon_, info.ssi_signo == SIGHUP ? SIGHUP : SIGTERM);
    return false;
  }

  // Nobody's child has an exit status: it was killed unless it has said that it stops.
  bool AwaitAdopted() {
    const FileDescriptor process(static_cast<int>(::syscall(SYS_pidfd_open, daemon_, 0)));
    const absl::Time deadline = absl::Now() + kEndTime;
    while (::getppid() == daemon_ && absl::Now() < deadline) {
      pollfd polled{process.get(), POLLIN, 0};
      ::poll(&polled, 1, 20);
    }
    status_ = SIGKILL;
    return true;
  }

  // False at the end of the connection.
  bool ReceiveAll() {
    for (;;) {
      switch (Receive()) {
        case Received::kMessage:
          break;
        case Received::kNothing:
          return true;
        case Received::kEnd:
          return false;
      }
    }
  }

  enum class Received : uint8_t { kMessage, kNothing, kEnd };

  Received Receive() {
    char text[kMaxMessageBytes];
    iovec iov{text, sizeof(text)};
    alignas(cmsghdr) char control[CMSG_SPACE(kMaxMessageFds * sizeof(int))];
    msghdr message{};
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t received = ::recvmsg(link_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
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
    Obey(std::string(text, static_cast<size_t>(received)), std::move(fds), (message.msg_flags & MSG_CTRUNC) != 0);
    return Received::kMessage;
  }

  void Obey(const std::string& message, std::vector<FileDescriptor> fds, bool truncated) {
    std::string name;
    bool store = false, remove = false;
    for (const std::string& line : std::vector<std::string>(absl::StrSplit(message, '\n'))) {
      if (line.rfind("FDNAME=", 0) == 0) name = line.substr(7);
      store = store || line == "FDSTORE=1";
      remove = remove || line == "FDSTOREREMOVE=1";
      ready_ = ready_ || line == "READY=1";
      stopped_ = stopped_ || line == kStoppedMessage;
    }
    if (name.empty() || name.find(':') != std::string::npos) return;
    if (remove || store) std::erase_if(kept_, [&](const Kept& kept) { return kept.name == name; });
    if (!store) return;
    if (truncated) {
      LogError(absl::StrCat("the keeper has no descriptors left for ", name, ", which does not outlive the daemon now; ",
                            "raise its limit with ulimit -n"));
      return;
    }
    for (FileDescriptor& fd : fds) kept_.push_back({name, std::move(fd)});
  }

  std::string Obituary() const {
    if (daemon_ <= 0) return "the daemon cannot be started";
    if (WIFSIGNALED(status_)) return absl::StrCat("the daemon was killed by signal ", WTERMSIG(status_));
    return absl::StrCat("the daemon has ended with status ", WEXITSTATUS(status_));
  }

  // For whoever has to decide whether it may be dropped.
  std::string KeptText() const {
    std::map<std::string, int64_t> bytes;
    for (const Kept& kept : kept_) {
      struct stat file {};
      ::fstat(kept.fd.get(), &file);
      bytes[kept.name] += file.st_size;
    }
    if (bytes.empty()) return "nothing";
    const auto format = [](std::string* out, const auto& entry) {
      absl::StrAppend(out, entry.first, " (", entry.second, " bytes)");
    };
    return absl::StrCat("the memory of ", absl::StrJoin(bytes, ", ", format),
                        failures_ > 2 ? "; SIGTERM to the keeper drops it" : "");
  }

  // Until SIGHUP or for so long. False: a signal asks for the end.
  bool Pause(absl::Duration time) {
    const absl::Time end = absl::Now() + time;
    for (absl::Duration left = time; left > absl::ZeroDuration(); left = end - absl::Now()) {
      pollfd polled{signals_.get(), POLLIN, 0};
      if (::poll(&polled, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1) <= 0) continue;
      signalfd_siginfo info;
      if (::read(signals_.get(), &info, sizeof(info)) != sizeof(info) || info.ssi_signo == SIGCHLD) continue;
      if (info.ssi_signo == SIGHUP) return true;
      LogWarning(absl::StrCat("the keeper was told to stop and drops ", KeptText()));
      return false;
    }
    return true;
  }

  const std::vector<std::string> command_;
  FileDescriptor signals_;
  sigset_t old_signals_;
  FileDescriptor link_;  // to the present daemon
  pid_t daemon_ = 0;
  bool own_child_ = false;
  int status_ = 0;  // as waitpid has it, of the last daemon
  bool ready_ = false;
  bool stopped_ = false;   // the daemon has said that it exits on purpose
  bool stopping_ = false;  // it was asked to
  int failures_ = 0;       // daemons in a row that were never ready
  std::vector<Kept> kept_;
};

}  // namespace

int RunKeeper(const std::vector<std::string>& command) { return Keeper(command).Run(); }

}  // namespace superoffload
