// Runs another program and exchanges bytes with it.
#ifndef SUPEROFFLOAD_CLIENT_CTL_CHILD_H_
#define SUPEROFFLOAD_CLIENT_CTL_CHILD_H_

#include <string>
#include <vector>

namespace superoffload::ctl {

struct ChildResult {
  int status = -1;  // its exit status; -1: it could not be run, or was killed
  std::string output;
};

// `words` are the program, by its path or a name in $PATH, and its arguments. It reads `input`, and shares standard error.
ChildResult RunChild(std::vector<std::string> words, const std::string& input);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_CHILD_H_
