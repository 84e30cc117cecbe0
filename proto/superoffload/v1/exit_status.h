// Exit statuses of our programs that Abseil would choose otherwise.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace superoffload {

// To be called before absl::ParseCommandLine(), which ends with 1 where it has printed the help that was asked for.
inline void EndWithZeroAfterHelp(int argc, char** argv) {
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    const std::string_view word = argv[i];
    if (!word.starts_with("--help") && word != "-help") continue;
    // Whoever exits from here on is Abseil.
    std::atexit([] {
      std::fflush(nullptr);  // std::cout has no buffer of its own
      std::_Exit(0);
    });
    return;
  }
}

}  // namespace superoffload
