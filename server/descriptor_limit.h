// How many descriptors a process may have. Every optimizer takes five, in the daemon and in its keeper.
#ifndef SUPEROFFLOAD_SERVER_DESCRIPTOR_LIMIT_H_
#define SUPEROFFLOAD_SERVER_DESCRIPTOR_LIMIT_H_

namespace superoffload {

// Raises the soft limit, often 1024 for the sake of select(2), to the hard one. Logs when the kernel refuses.
void RaiseDescriptorLimit();

}  // namespace superoffload

#endif  // SUPEROFFLOAD_SERVER_DESCRIPTOR_LIMIT_H_
