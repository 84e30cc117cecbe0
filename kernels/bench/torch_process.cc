#include "kernels/bench/torch_process.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

namespace superoffload::kernels {

TorchProcess::TorchProcess(const std::string& python, const Arrays& arrays, int threads) {
  int to[2], from[2];
  if (::pipe2(to, O_CLOEXEC) != 0 || ::pipe2(from, O_CLOEXEC) != 0) std::abort();
  std::vector<std::string> words{python, SUPEROFFLOAD_TORCH_ADAMW, std::to_string(arrays.fd()),
                                 std::to_string(arrays.elements()), std::to_string(threads)};
  for (int array = 0; array < 4; ++array) words.push_back(std::to_string(arrays.offset(array)));
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(to[0], STDIN_FILENO);
    ::dup2(from[1], STDOUT_FILENO);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  ::close(to[0]);
  ::close(from[1]);
  requests_ = ::fdopen(to[1], "w");
  replies_ = ::fdopen(from[0], "r");
}

TorchProcess::~TorchProcess() {
  std::fclose(requests_);
  ::waitpid(pid_, nullptr, 0);
  std::fclose(replies_);
}

double TorchProcess::Step(const std::string& implementation) {
  std::fprintf(requests_, "%s\n", implementation.c_str());
  std::fflush(requests_);
  double seconds = 0;
  if (std::fscanf(replies_, "%lf", &seconds) != 1) {
    std::fprintf(stderr, "adam_bench: the torch process ended; does --torch name a Python that has torch?\n");
    std::exit(1);
  }
  return seconds;
}

}  // namespace superoffload::kernels
