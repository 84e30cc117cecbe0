// Where memory is to lie, and where it does lie.
#ifndef SUPEROFFLOAD_SERVER_MEMORY_BINDING_H_
#define SUPEROFFLOAD_SERVER_MEMORY_BINDING_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "absl/status/status.h"

namespace superoffload::memory {

struct Binding {
  std::optional<unsigned> node;  // NUMA node that every page must come from; none: wherever the kernel takes it
  bool strict = true;            // memory that lies elsewhere is an error; else it is only reported
  bool huge_pages = true;        // from the kernel's pool if it has enough, else transparent ones where it gives them
  // Whoever can write to a memfd can punch a hole into it. With other pages the hole reads as zeros; with an empty pool
  // it would be a SIGBUS: what trainers write must not come from there.
  bool from_pool = true;
};

// Binds a mapping of shared memory, before any of its pages exist. FAILED_PRECONDITION: the kernel refuses the node.
absl::Status BindToNode(void* data, size_t bytes, unsigned node);

// Bytes by NUMA node, from a sample of the pages of a mapping that has them all; empty where the kernel does not tell.
std::map<int, uint64_t> BytesByNode(const void* data, size_t bytes);

// FAILED_PRECONDITION: some of the bytes lie on another node.
absl::Status CheckNode(const std::map<int, uint64_t>& bytes_by_node, unsigned node);

}  // namespace superoffload::memory

#endif  // SUPEROFFLOAD_SERVER_MEMORY_BINDING_H_
