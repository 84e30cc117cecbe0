// How many descriptors a process may have. Every optimizer takes five, in the daemon and in its keeper.
#ifndef SUPEROFFLOAD_SERVER_HOST_DESCRIPTOR_LIMIT_H_
#define SUPEROFFLOAD_SERVER_HOST_DESCRIPTOR_LIMIT_H_

#include "server/transport/access_policy.h"

namespace superoffload::host {

// Raises the soft limit, often 1024 for the sake of select(2), to the hard one. Logs when the kernel refuses.
void RaiseDescriptorLimit();

// Connections to each of the daemon's two sockets, two descriptors each: most are left to the optimizers.
transport::ConnectionLimits UsersConnectionLimits();

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_DESCRIPTOR_LIMIT_H_
