#include "client/ctl/programs.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "superoffload/v1/file_descriptor.h"

namespace superoffload::ctl {
namespace {

struct Pipe {
  FileDescriptor read, write;
};

bool Open(Pipe& pipe) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return false;
  pipe.read = FileDescriptor(ends[0]);
  pipe.write = FileDescriptor(ends[1]);
  return true;
}

// Writes and reads at once: neither side then waits for the other to make room.
std::string Exchange(FileDescriptor to, FileDescriptor from, const std::string& input) {
  ::fcntl(to.get(), F_SETFL, O_NONBLOCK);
  std::string output;
  for (size_t written = 0;;) {
    if (written == input.size()) to = FileDescriptor();
    pollfd ends[] = {{from.get(), POLLIN, 0}, {to.get(), POLLOUT, 0}};  // of a descriptor of -1 poll knows nothing
    if (::poll(ends, 2, -1) < 0 && errno != EINTR) return output;
    if (ends[1].revents != 0) {
      const ssize_t bytes = ::write(to.get(), input.data() + written, input.size() - written);
      written = bytes >= 0 ? written + static_cast<size_t>(bytes) : errno == EAGAIN ? written : input.size();
    }
    if (ends[0].revents != 0) {
      char part[65536];
      const ssize_t bytes = ::read(from.get(), part, sizeof(part));
      if (bytes <= 0) return output;
      output.append(part, static_cast<size_t>(bytes));
    }
  }
}

}  // namespace

std::filesystem::path ThisProgram() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error);
}

std::string InstalledDaemon() {
  std::error_code error;
  const std::filesystem::path here = ThisProgram().parent_path();
  for (const char* place : {"superoffloadd", "../server/superoffloadd"}) {
    if (std::filesystem::exists(here / place, error)) return (here / place).lexically_normal();
  }
  return "/usr/bin/superoffloadd";
}

std::string DaemonProgram() {
  const char* const given = std::getenv("SUPEROFFLOAD_DAEMON");
  return given != nullptr && *given != '\0' ? given : InstalledDaemon();
}

std::string AbsolutePath(const std::string& path) {
  std::error_code error;
  return std::filesystem::absolute(path, error).lexically_normal();
}

ChildResult RunChild(std::vector<std::string> words, const std::string& input) {
  Pipe in, out;
  if (!Open(in) || !Open(out)) return {};
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, in.read.get(), STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, out.write.get(), STDOUT_FILENO);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, words.front().c_str(), &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  in.read = FileDescriptor();
  out.write = FileDescriptor();
  if (error != 0) return {};
  ::signal(SIGPIPE, SIG_IGN);  // of a child that is gone its exit status tells
  ChildResult result;
  result.output = Exchange(std::move(in.write), std::move(out.read), input);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status)) result.status = WEXITSTATUS(status);
  return result;
}

}  // namespace superoffload::ctl
