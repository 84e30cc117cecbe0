// What can go wrong inside the client library: a canonical code (the numbers of gRPC and absl) and a sentence.
#ifndef SUPEROFFLOAD_CLIENT_SRC_STATUS_H_
#define SUPEROFFLOAD_CLIENT_SRC_STATUS_H_

#include <string>
#include <utility>

namespace superoffload::client {

enum class Code {
  kOk = 0,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kAlreadyExists = 6,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
};

struct Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
};

template <typename... Parts>
Status Error(Code code, Parts&&... parts) {
  const auto text = [](auto&& part) {
    if constexpr (requires { std::to_string(part); }) {
      return std::to_string(part);
    } else {
      return std::string(part);
    }
  };
  return {code, (std::string() + ... + text(std::forward<Parts>(parts)))};
}

// "`what`: the system's words for errno".
Status ErrnoError(Code code, const std::string& what);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_STATUS_H_
