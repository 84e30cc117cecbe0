// What daemon and client show of text that others chose: names and paths may hold newlines that forge a line of a log,
// or escape sequences that a terminal obeys.
#ifndef SUPEROFFLOAD_V1_PRINTABLE_H_
#define SUPEROFFLOAD_V1_PRINTABLE_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace superoffload {

// `text` with control characters (C0, DEL, and C1 as UTF-8 has them) as \xNN.
inline std::string Printable(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string printable;
  printable.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    const bool c1 = c == 0xC2 && i + 1 < text.size() && (static_cast<unsigned char>(text[i + 1]) & 0xE0) == 0x80;
    if (c < 0x20 || c == 0x7F || c1) {
      const unsigned char shown = c1 ? static_cast<unsigned char>(text[++i]) : c;
      printable += "\\x";
      printable += kDigits[shown >> 4];
      printable += kDigits[shown & 15];
    } else {
      printable += static_cast<char>(c);
    }
  }
  return printable;
}

}  // namespace superoffload

#endif  // SUPEROFFLOAD_V1_PRINTABLE_H_
