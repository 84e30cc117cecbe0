// Other programs: where those that are installed with this one are, and running them.
#ifndef SUPEROFFLOAD_CLIENT_CTL_PROGRAMS_H_
#define SUPEROFFLOAD_CLIENT_CTL_PROGRAMS_H_

#include <filesystem>
#include <string>
#include <vector>

namespace superoffload::ctl {

std::filesystem::path ThisProgram();

// The superoffloadd that is installed beside this program, or lies in the tree that it was built in.
std::string InstalledDaemon();

// $SUPEROFFLOAD_DAEMON, or the installed one.
std::string DaemonProgram();

// For a process that has another working directory.
std::string AbsolutePath(const std::string& path);

struct ChildResult {
  int status = -1;  // its exit status; -1: it could not be run, or was killed
  std::string output;
};

// `words` are the program, by its path or a name in $PATH, and its arguments. It reads `input`, and shares standard
// error.
ChildResult RunChild(std::vector<std::string> words, const std::string& input);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_PROGRAMS_H_
