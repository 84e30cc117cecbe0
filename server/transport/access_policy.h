// Which users a daemon serves, and which of them are operators.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_ACCESS_POLICY_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_ACCESS_POLICY_H_

#include <sys/types.h>

#include <cstddef>
#include <set>

namespace superoffload::transport {

struct AccessPolicy {
  std::set<uid_t> allowed;    // empty: everybody
  std::set<uid_t> operators;  // see and touch the optimizers of all users, as root does

  bool IsOperator(uid_t uid) const { return uid == 0 || operators.contains(uid); }
  bool Allows(uid_t uid) const { return allowed.empty() || allowed.contains(uid) || IsOperator(uid); }
};

// How many connections the users other than root may have to one socket.
struct ConnectionLimits {
  size_t per_user = 256;
  size_t total = 1024;
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_ACCESS_POLICY_H_
