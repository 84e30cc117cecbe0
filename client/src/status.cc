#include "client/src/status.h"

#include <cerrno>
#include <system_error>

namespace superoffload::client {

Status ErrnoError(Code code, const std::string& what) {
  return Error(code, what, ": ", std::generic_category().message(errno));
}

}  // namespace superoffload::client
