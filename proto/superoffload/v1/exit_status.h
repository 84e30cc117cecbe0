// What our programs do when they are asked for help: they end with 0, as Abseil does not.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace superoffload {

// Of a program without Abseil's flags.
inline bool AsksForHelp(int argc, char** argv) {
  return argc > 1 && (std::string_view(argv[1]) == "--help" || std::string_view(argv[1]) == "-h");
}

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
