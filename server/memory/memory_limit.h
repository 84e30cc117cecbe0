// How much memory this process can use at all: what the machine has, and what its control group leaves of it.
#ifndef SUPEROFFLOAD_SERVER_MEMORY_MEMORY_LIMIT_H_
#define SUPEROFFLOAD_SERVER_MEMORY_MEMORY_LIMIT_H_

#include <cstdint>
#include <string>

namespace superoffload::memory {

// The least of memory.max and memory.high (control groups v2) or memory.limit_in_bytes (v1) of this process's group and
// of those above it, as far as they are mounted; the largest uint64_t when nothing limits. `root` is where the system's
// proc and sys lie.
uint64_t ControlGroupLimitBytes(const std::string& root = "");

// The least of the machine's memory and of the control group's limit.
uint64_t MemoryLimitBytes();

// The budget of optimizers: what is configured, but never beyond `limit_bytes`; 0 means 80 % of that.
uint64_t BudgetBytes(uint64_t configured_bytes, uint64_t limit_bytes);

}  // namespace superoffload::memory

#endif  // SUPEROFFLOAD_SERVER_MEMORY_MEMORY_LIMIT_H_
