// Log lines for the operator, on standard error: one line per event. Under systemd each carries its priority, elsewhere
// the time.
#ifndef SUPEROFFLOAD_SERVER_HOST_LOG_H_
#define SUPEROFFLOAD_SERVER_HOST_LOG_H_

#include <string>

namespace superoffload::host {

void LogInfo(const std::string& message);
void LogWarning(const std::string& message);
void LogError(const std::string& message);

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_LOG_H_
