// How long a client waits for a daemon that accepts connections and says nothing.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CONNECT_PATIENCE_H_
#define SUPEROFFLOAD_CLIENT_SRC_CONNECT_PATIENCE_H_

#include <chrono>
#include <cstdlib>

namespace superoffload::client {

// $SUPEROFFLOAD_CONNECT_SECONDS, a millisecond at least; 30 s where that is no number from 0 to 86400.
inline std::chrono::milliseconds ConnectPatience() {
  constexpr double kDefault = 30, kLongest = 86400;
  const char* const text = std::getenv("SUPEROFFLOAD_CONNECT_SECONDS");
  char* end = nullptr;
  double seconds = text == nullptr ? -1 : std::strtod(text, &end);
  if (end == text || (end != nullptr && *end != '\0') || !(seconds >= 0 && seconds <= kLongest)) seconds = kDefault;
  return std::chrono::milliseconds(seconds < 1e-3 ? 1 : static_cast<long long>(1000 * seconds));
}

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_CONNECT_PATIENCE_H_
