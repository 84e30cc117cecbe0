// A real superoffloadd in a process of its own ($SUPEROFFLOAD_DAEMON, else that of this build), for tests that talk to
// it from C++.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_DAEMON_PROCESS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_DAEMON_PROCESS_H_

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

extern char** environ;

namespace superoffload::test {

// Starts a program: its path, then its arguments. Aborts when that cannot be.
inline pid_t Spawn(std::vector<std::string> words, const posix_spawn_file_actions_t* actions = nullptr) {
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t pid = 0;
  if (::posix_spawn(&pid, words[0].c_str(), actions, nullptr, arguments.data(), environ) != 0) std::abort();
  return pid;
}

// Started by the constructor, which returns once it listens; stopped by the destructor. Aborts the test program when
// the daemon cannot start: nothing else could be tested.
class DaemonProcess {
 public:
  explicit DaemonProcess(std::vector<std::string> flags = {}) {
    std::string directory = std::filesystem::temp_directory_path() / "so-test-XXXXXX";
    if (::mkdtemp(directory.data()) == nullptr) std::abort();
    directory_ = directory;
    const char* chosen = std::getenv("SUPEROFFLOAD_DAEMON");
    std::vector<std::string> words{chosen != nullptr ? chosen : SUPEROFFLOADD_BINARY,
                                   "--runtime_directory=" + directory_, "--metrics_address=off",
                                   "--exit_on_stdin_eof"};  // even if the test aborts
    words.insert(words.end(), flags.begin(), flags.end());
    int stdin_pipe[2];
    if (::pipe2(stdin_pipe, O_CLOEXEC) != 0) std::abort();
    stdin_ = stdin_pipe[1];
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, stdin_pipe[0], STDIN_FILENO);
    pid_ = Spawn(std::move(words), &actions);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(stdin_pipe[0]);
    while (!Listens()) {
      if (::waitpid(pid_, nullptr, WNOHANG) != 0) std::abort();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  ~DaemonProcess() {
    if (pid_ > 0) Stop();
    ::close(stdin_);
    std::filesystem::remove_all(directory_);
  }
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  // Ends it with SIGTERM and returns its exit status, or minus the signal that killed it.
  int Stop() {
    ::kill(pid_, SIGTERM);
    int status = 0;
    ::waitpid(std::exchange(pid_, 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  pid_t pid() const { return pid_; }

  // With --keeper, pid() is the keeper, and this its only child; none while the last one is not yet replaced.
  std::optional<pid_t> kept_daemon() const {
    std::ifstream children("/proc/" + std::to_string(pid_) + "/task/" + std::to_string(pid_) + "/children");
    pid_t child = 0;
    return children >> child ? std::optional(child) : std::nullopt;
  }
  std::string endpoint() const { return "unix:" + directory_ + "/control.sock"; }
  std::string descriptor_socket() const { return directory_ + "/descriptors.sock"; }

 private:
  bool Listens() const {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof(address.sun_path), "%s/control.sock", directory_.c_str());
    const bool connected = ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    ::close(fd);
    return connected;
  }

  std::string directory_;
  int stdin_ = -1;
  pid_t pid_ = 0;
};

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_DAEMON_PROCESS_H_
