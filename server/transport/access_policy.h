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

// How many connections the users may have to one socket. A process needs one.
struct ConnectionLimits {
  size_t per_user = 128;
  size_t total = 1024;  // root may have more

  // Whether a user that has `own` of `all` may have one more. The last quarter is for those who have next to none, so
  // that a few users cannot take everything.
  bool Admits(uid_t uid, size_t own, size_t all) const {
    constexpr size_t kNextToNone = 4;
    if (own >= per_user) return false;
    return uid == 0 || all < (own < kNextToNone ? total : total - total / 4);
  }
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_ACCESS_POLICY_H_
