#include "server/host/log.h"

#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "superoffload/v1/printable.h"

namespace superoffload::host {
namespace {

void Write(int priority, const char* level, const std::string& message) {
  static const bool journal = std::getenv("JOURNAL_STREAM") != nullptr;
  const std::string line =
      journal ? absl::StrCat("<", priority, ">", message, "\n")
              : absl::StrCat(absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone()), " ", level,
                             " ", message, "\n");
  // One write per line, so that lines of several threads do not mix.
  (void)!::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace

void LogInfo(const std::string& message) { Write(6, "INFO", Printable(message)); }
void LogWarning(const std::string& message) { Write(4, "WARNING", Printable(message)); }
void LogError(const std::string& message) { Write(3, "ERROR", Printable(message)); }

}  // namespace superoffload::host
