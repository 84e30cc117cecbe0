// Sleeping on a word of memory that another process writes.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_FUTEX_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_FUTEX_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace superoffload::transport {

// Sleeps while `*word == expected`; may wake spuriously. Shared between processes.
inline void FutexWait(uint32_t* word, uint32_t expected) {
  ::syscall(SYS_futex, word, FUTEX_WAIT, expected, nullptr, nullptr, 0);
}

inline void FutexWakeAll(uint32_t* word) { ::syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_FUTEX_H_
