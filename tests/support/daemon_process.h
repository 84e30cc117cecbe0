// A real superoffloadd in a process of its own, for tests that talk to it from C++.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_DAEMON_PROCESS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_DAEMON_PROCESS_H_

#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

extern char** environ;

namespace superoffload::test {

// Started by the constructor, which returns once it listens; stopped by the destructor. Aborts the test program when
// the daemon cannot start: nothing else could be tested.
class DaemonProcess {
 public:
  explicit DaemonProcess(std::vector<std::string> flags = {}) {
    std::string directory = std::filesystem::temp_directory_path() / "so-test-XXXXXX";
    if (::mkdtemp(directory.data()) == nullptr) std::abort();
    directory_ = directory;
    std::vector<std::string> words{SUPEROFFLOADD_BINARY, "--runtime_directory=" + directory_, "--metrics_address=off"};
    words.insert(words.end(), flags.begin(), flags.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    if (::posix_spawn(&pid_, SUPEROFFLOADD_BINARY, nullptr, nullptr, arguments.data(), environ) != 0) std::abort();
    while (!std::filesystem::exists(directory_ + "/control.sock")) {
      if (::waitpid(pid_, nullptr, WNOHANG) != 0) std::abort();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  ~DaemonProcess() {
    if (pid_ > 0) Stop();
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

  std::string endpoint() const { return "unix:" + directory_ + "/control.sock"; }
  std::string descriptor_socket() const { return directory_ + "/descriptors.sock"; }

 private:
  std::string directory_;
  pid_t pid_ = 0;
};

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_DAEMON_PROCESS_H_
