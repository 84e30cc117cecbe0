#include "server/host/keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "server/host/keeper_protocol.h"
#include "server/host/keeper_socket.h"
#include "server/host/kept_descriptors.h"
#include "server/host/log.h"
#include "server/host/own_program.h"
#include "server/memory/shared_memory.h"

namespace superoffload::host {
namespace {

using memory::FileDescriptor;

constexpr int kFirstListenFd = 3;  // SD_LISTEN_FDS_START
constexpr int kCannotStart = 126;  // exit status of a child that did not become the daemon
constexpr absl::Duration kShortLife = absl::Seconds(1);
constexpr absl::Duration kShortestPause = absl::Milliseconds(50);
constexpr absl::Duration kLongestPause = absl::Seconds(30);
constexpr int kMostStops = 4;  // daemons that are told to stop: those after the first finish what one that died left
constexpr absl::Duration kEndTime = absl::Seconds(5);  // between a socket's end and its process's

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
    bool running = TakeOver();
    for (;;) {
      const absl::Time start = absl::Now();
      if (!running) running = Start();
      if (running) {
        word_ = {};
        told_ = false;
        Watch();
        running = false;
        if (word_.stopped) return 0;
        if (stopping_ && kept_.empty()) {
          return WIFSIGNALED(status_) && WTERMSIG(status_) == SIGTERM ? 0 : 1;  // met before it listened
        }
        if (WIFEXITED(status_) && kept_.empty()) return WEXITSTATUS(status_);  // nothing is lost
      }
      if (stopping_) {
        if (!FinishesStop()) return 1;
        continue;
      }
      failures_ = word_.ready ? 0 : failures_ + 1;
      const absl::Duration pause = std::min(kLongestPause, kShortestPause * (int64_t{1} << std::min(failures_, 10)));
      LogWarning(absl::StrCat(
          Obituary(), "; it is started again", failures_ > 1 ? absl::StrCat(" in ", absl::FormatDuration(pause)) : "",
          " with ", kept_.Text(),
          failures_ > 2 ? "; superoffloadctl kept lists it, drop-kept frees some of it, SIGTERM to the keeper all"
                        : ""));
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
  bool TakeOver() {
    const char* const taken_over = std::getenv(kTakenOverDaemonVariable);
    int socket = -1;
    if (taken_over == nullptr || std::sscanf(taken_over, "%d:%d", &socket, &daemon_) != 2) return false;
    ::unsetenv(kTakenOverDaemonVariable);
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
    for (const KeptDescriptors::Kept& kept : kept_.all()) {
      names.push_back(kept.name);
      fds.push_back(kept.fd.get());
    }
    fds.push_back(socket);
    FileDescriptor text(::memfd_create("superoffload-names", MFD_CLOEXEC));
    const std::string joined = absl::StrJoin(names, ":");
    if (!text.valid() || ::write(text.get(), joined.data(), joined.size()) != static_cast<ssize_t>(joined.size())) {
      LogError(absl::StrCat("the keeper cannot write down the names of what it keeps: ", std::strerror(errno)));
      ::_exit(kCannotStart);
    }
    fds.push_back(text.get());
    if (!Arrange(fds, kFirstListenFd)) {
      LogError(absl::StrCat("the keeper cannot pass on ", fds.size(), " descriptors: ", std::strerror(errno),
                            "; raise its limit with ulimit -n"));
      ::_exit(kCannotStart);
    }
    ::unsetenv("NOTIFY_SOCKET");
    ::setenv(kKeeperSocketVariable, absl::StrCat(kFirstListenFd + names.size()).c_str(), 1);
    ::setenv("LISTEN_PID", std::to_string(::getpid()).c_str(), 1);
    ::setenv("LISTEN_FDS", std::to_string(names.size()).c_str(), 1);
    ::unsetenv("LISTEN_FDNAMES");
    ::setenv(kKeptNamesVariable, absl::StrCat(kFirstListenFd + names.size() + 1).c_str(), 1);
    std::vector<char*> arguments;
    for (const std::string& word : command_) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    const std::string program = OwnProgram();
    ::execv(program.c_str(), arguments.data());
    LogError(absl::StrCat("the keeper cannot run ", program, ": ", std::strerror(errno)));
    ::_exit(kCannotStart);
  }

  // Serves the daemon until it has ended.
  void Watch() {
    for (bool ended = false; !ended;) {
      std::array<pollfd, 3> polled{pollfd{link_.get(), POLLIN, 0}, pollfd{signals_.get(), POLLIN, 0},
                                   pollfd{socket_.listener(), POLLIN, 0}};
      if (::poll(polled.data(), polled.size(), -1) < 0) continue;
      if (polled[1].revents != 0) ended = OnSignal();
      if (polled[0].revents != 0 && !kept_.ReceiveAll(link_.get(), word_)) {
        link_ = FileDescriptor();  // whoever dies closes it; poll ignores it from here on
        if (!own_child_) ended = AwaitTakenOver();
      }
      if (!ended) PassStopOn();
      if (word_.listener.valid()) socket_.Listen(std::move(word_.listener));
      if (polled[2].revents != 0) socket_.Serve(kept_, /*daemon_runs=*/true);
    }
    if (link_.valid()) kept_.ReceiveAll(link_.get(), word_);  // what it said before it died
    link_ = FileDescriptor();
  }

  // SIGTERM, where one has come. A daemon that starts would die of it, and lose what is kept: it gets it once it is
  // ready.
  void PassStopOn() {
    if (!stopping_ || told_ || !(word_.ready || kept_.empty())) return;
    ::kill(daemon_, SIGTERM);
    told_ = true;
  }

  // The daemon died before it had stopped. Whether another one is to write what it has not (stop_checkpoints.h).
  bool FinishesStop() {
    if (++stops_ == kMostStops) {
      LogError(absl::StrCat(Obituary(), " while it stopped, the last of ", kMostStops,
                            " that did not finish; the keeper drops ", kept_.Text()));
      return false;
    }
    LogWarning(absl::StrCat(Obituary(), " while it stopped; it is started again to finish that with ", kept_.Text()));
    return true;
  }

  // Returns whether the daemon has ended.
  bool OnSignal() {
    signalfd_siginfo info;
    if (::read(signals_.get(), &info, sizeof(info)) != sizeof(info)) return false;
    if (info.ssi_signo == SIGCHLD) return own_child_ && ::waitpid(daemon_, &status_, WNOHANG) == daemon_;
    if (info.ssi_signo == SIGHUP) {
      ::kill(daemon_, SIGHUP);
    } else {
      stopping_ = true;
    }
    return false;
  }

  // Nobody's child has an exit status: it was killed unless it has said that it stops.
  bool AwaitTakenOver() {
    const FileDescriptor process(static_cast<int>(::syscall(SYS_pidfd_open, daemon_, 0)));
    const absl::Time deadline = absl::Now() + kEndTime;
    while (::getppid() == daemon_ && absl::Now() < deadline) {
      pollfd polled{process.get(), POLLIN, 0};
      ::poll(&polled, 1, 20);
    }
    status_ = SIGKILL;
    return true;
  }

  std::string Obituary() const {
    if (daemon_ <= 0) return "the daemon cannot be started";
    if (WIFSIGNALED(status_)) return absl::StrCat("the daemon was killed by signal ", WTERMSIG(status_));
    return absl::StrCat("the daemon has ended with status ", WEXITSTATUS(status_));
  }

  // Until SIGHUP or for so long. False: a signal asks for the end.
  bool Pause(absl::Duration time) {
    const absl::Time end = absl::Now() + time;
    for (absl::Duration left = time; left > absl::ZeroDuration(); left = end - absl::Now()) {
      std::array<pollfd, 2> polled{pollfd{signals_.get(), POLLIN, 0}, pollfd{socket_.listener(), POLLIN, 0}};
      if (::poll(polled.data(), polled.size(), static_cast<int>(absl::ToInt64Milliseconds(left)) + 1) <= 0) continue;
      if (polled[1].revents != 0) socket_.Serve(kept_, /*daemon_runs=*/false);
      if (polled[0].revents == 0) continue;
      signalfd_siginfo info;
      if (::read(signals_.get(), &info, sizeof(info)) != sizeof(info) || info.ssi_signo == SIGCHLD) continue;
      if (info.ssi_signo == SIGHUP) return true;
      LogWarning(absl::StrCat("the keeper was told to stop and drops ", kept_.Text()));
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
  DaemonWord word_;
  bool stopping_ = false;  // a signal has asked for the end
  bool told_ = false;      // and the present daemon has got it
  int stops_ = 0;          // daemons that died after that
  int failures_ = 0;       // daemons in a row that were never ready
  KeptDescriptors kept_;
  KeeperSocket socket_;
};

}  // namespace

int RunKeeper(const std::vector<std::string>& command) { return Keeper(command).Run(); }

}  // namespace superoffload::host
