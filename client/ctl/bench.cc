#include "client/ctl/bench.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

namespace superoffload::ctl {

int RunBench(int argc, char** argv) {
  std::error_code error;
  const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  std::string name = "adam_bench", tune = "--tune";
  std::vector<char*> words{name.data(), tune.data()};
  for (int i = 2; i < argc; ++i) words.push_back(argv[i]);
  words.push_back(nullptr);
  // Installed beside this program, or in the tree that it was built in.
  for (const std::filesystem::path& place : {here / name, here / "../kernels/bench" / name}) {
    ::execv(place.c_str(), words.data());
  }
  ::execvp(name.c_str(), words.data());
  std::fprintf(stderr, "superoffloadctl: cannot run adam_bench: %s; it is in the Debian package and not in the wheel\n",
               std::strerror(errno));
  return 1;
}

}  // namespace superoffload::ctl
