// How many descriptors a process may have, and what they are enough for. Every optimizer takes five, in the daemon and
// in its keeper, and one more while a trainer is attached.
#ifndef SUPEROFFLOAD_SERVER_HOST_DESCRIPTOR_LIMIT_H_
#define SUPEROFFLOAD_SERVER_HOST_DESCRIPTOR_LIMIT_H_

#include <cstddef>

#include "server/transport/access_policy.h"

namespace superoffload::host {

// Raises the soft limit, often 1024 for the sake of select(2), to the hard one. Logs when the kernel refuses.
void RaiseDescriptorLimit();

// Connections to the descriptor socket, and to the control socket: most descriptors are left to the optimizers. The
// control socket takes a few more, since who has too many learns it in a sentence from the other one only.
transport::ConnectionLimits DescriptorConnectionLimits();
transport::ConnectionLimits ControlConnectionLimits();

// Optimizers for which the rest is enough.
size_t MostOptimizers();

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_DESCRIPTOR_LIMIT_H_
