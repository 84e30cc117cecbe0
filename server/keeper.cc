#include "server/keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "server/log.h"
#include "server/memory/shared_memory.h"

namespace superoffload {
namespace {

using memory::FileDescriptor;

constexpr int kFirstListenFd = 3;       // SD_LISTEN_FDS_START
constexpr size_t kMaxMessageFds = 253;  // SCM_MAX_FD
constexpr absl::Duration kShortLife = absl::Seconds(1);

struct Kept {
  std::string name;
  FileDescriptor fd;
};

class Keeper {
 public:
  explicit Keeper(const std::vector<std::string>& command) : command_(command) {}

  int Run() {
    if (!Listen()) {
      LogError(absl::StrCat("the keeper cannot open its sockets: ", std::strerror(errno)));
      return 1;
    }
    for (;;) {
      const absl::Time start = absl::Now();
      const pid_t child = Start();
      if (child < 0) return 1;
      const int status = Watch(child);
      if (WIFEXITED(status)) return WEXITSTATUS(status);
      if (stopping_) return WTERMSIG(status) == SIGTERM ? 0 : 1;  // SIGTERM met it before it could listen to it
      LogWarning(absl::StrCat("the daemon was killed by signal ", WTERMSIG(status), "; starting it again with ",
                              kept_.size(), " descriptors kept"));
      if (absl::Now() - start < kShortLife) absl::SleepFor(kPause);
    }
  }

 private:
  static constexpr absl::Duration kPause = absl::Milliseconds(50);

  bool Listen() {
    notify_ = FileDescriptor(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    address_ = absl::StrCat("superoffloadd-keeper-", ::getpid());  // in the abstract name space
    std::memcpy(address.sun_path + 1, address_.data(), address_.size());
    const socklen_t length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address_.size());
    const int on = 1;
    ::setsockopt(notify_.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof(on));
    if (::bind(notify_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) return false;
    sigset_t signals;
    sigemptyset(&signals);
    for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGCHLD}) sigaddset(&signals, signal);
    ::sigprocmask(SIG_BLOCK, &signals, &old_signals_);
    signals_ = FileDescriptor(::signalfd(-1, &signals, SFD_CLOEXEC));
    return signals_.valid();
  }

  pid_t Start() {
    const pid_t child = ::fork();
    if (child != 0) return child;
    ::sigprocmask(SIG_SETMASK, &old_signals_, nullptr);
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    std::vector<std::string> names;
    // Away from the numbers that they are to have, then onto them.
    std::vector<int> high;
    for (const Kept& kept : kept_) high.push_back(::fcntl(kept.fd.get(), F_DUPFD, 1024));
    for (size_t i = 0; i < kept_.size(); ++i) {
      ::dup2(high[i], kFirstListenFd + static_cast<int>(i));
      ::close(high[i]);
      names.push_back(kept_[i].name);
    }
    ::setenv("NOTIFY_SOCKET", ("@" + address_).c_str(), 1);
    ::setenv("LISTEN_PID", std::to_string(::getpid()).c_str(), 1);
    ::setenv("LISTEN_FDS", std::to_string(kept_.size()).c_str(), 1);
    ::setenv("LISTEN_FDNAMES", absl::StrJoin(names, ":").c_str(), 1);
    std::vector<char*> arguments;
    for (const std::string& word : command_) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }

  // Serves the child until it ends; returns its wait status.
  int Watch(pid_t child) {
    for (;;) {
      std::array<pollfd, 2> polled{pollfd{notify_.get(), POLLIN, 0}, pollfd{signals_.get(), POLLIN, 0}};
      if (::poll(polled.data(), polled.size(), -1) < 0) continue;
      if (polled[0].revents != 0) ReceiveAll(child);
      if (polled[1].revents == 0) continue;
      signalfd_siginfo info;
      if (::read(signals_.get(), &info, sizeof(info)) != sizeof(info)) continue;
      if (info.ssi_signo == SIGHUP) {
        ::kill(child, SIGHUP);
        continue;
      }
      if (info.ssi_signo != SIGCHLD) {
        stopping_ = true;
        ::kill(child, SIGTERM);
        continue;
      }
      int status = 0;
      if (::waitpid(child, &status, WNOHANG) == child) {
        ReceiveAll(child);  // what it said before it died
        return status;
      }
    }
  }

  void ReceiveAll(pid_t child) {
    while (Receive(child)) {
    }
  }

  bool Receive(pid_t child) {
    char text[4096];
    iovec iov{text, sizeof(text)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred)) + CMSG_SPACE(kMaxMessageFds * sizeof(int))];
    msghdr message{};
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t received = ::recvmsg(notify_.get(), &message, MSG_CMSG_CLOEXEC);
    if (received < 0) return false;
    std::vector<FileDescriptor> fds;
    pid_t sender = 0;
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_CREDENTIALS) {
        ucred credentials;
        std::memcpy(&credentials, CMSG_DATA(header), sizeof(credentials));
        sender = credentials.pid;
      } else if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
        const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; ++i) {
          int fd;
          std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
          fds.emplace_back(fd);
        }
      }
    }
    if (sender == child) Obey(std::string(text, static_cast<size_t>(received)), std::move(fds));
    return true;
  }

  void Obey(const std::string& message, std::vector<FileDescriptor> fds) {
    std::string name;
    bool store = false, remove = false;
    for (const std::string& line : std::vector<std::string>(absl::StrSplit(message, '\n'))) {
      if (line.rfind("FDNAME=", 0) == 0) name = line.substr(7);
      store = store || line == "FDSTORE=1";
      remove = remove || line == "FDSTOREREMOVE=1";
    }
    if (name.empty() || name.find(':') != std::string::npos) return;
    if (remove) std::erase_if(kept_, [&](const Kept& kept) { return kept.name == name; });
    if (!store) return;
    for (FileDescriptor& fd : fds) kept_.push_back({name, std::move(fd)});
  }

  const std::vector<std::string> command_;
  std::string address_;
  FileDescriptor notify_, signals_;
  sigset_t old_signals_;
  std::vector<Kept> kept_;
  bool stopping_ = false;
};

}  // namespace

int RunKeeper(const std::vector<std::string>& command) { return Keeper(command).Run(); }

}  // namespace superoffload
