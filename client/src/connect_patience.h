// How long a client waits for a daemon, as the environment wants it.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CONNECT_PATIENCE_H_
#define SUPEROFFLOAD_CLIENT_SRC_CONNECT_PATIENCE_H_

#include <chrono>
#include <cstdlib>

namespace superoffload::client {

// The seconds of an environment variable, a millisecond at least; `seconds` where that is no number from 0 to 86400.
inline std::chrono::milliseconds Patience(const char* variable, double seconds) {
  constexpr double kLongest = 86400;
  const char* const text = std::getenv(variable);
  char* end = nullptr;
  const double given = text == nullptr ? -1 : std::strtod(text, &end);
  if (end != text && end != nullptr && *end == '\0' && given >= 0 && given <= kLongest) seconds = given;
  return std::chrono::milliseconds(seconds < 1e-3 ? 1 : static_cast<long long>(1000 * seconds));
}

// For a daemon that accepts connections and says nothing.
inline std::chrono::milliseconds ConnectPatience() { return Patience("SUPEROFFLOAD_CONNECT_SECONDS", 30); }

// For the successor of a daemon that died, and for the socket of one that was stopped.
inline std::chrono::milliseconds ReconnectPatience() { return Patience("SUPEROFFLOAD_RECONNECT_SECONDS", 300); }
inline std::chrono::milliseconds SocketPatience() { return Patience("SUPEROFFLOAD_SOCKET_SECONDS", 10); }

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_CONNECT_PATIENCE_H_
