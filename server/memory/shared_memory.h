// Shared memory that a daemon hands out as a descriptor: a memfd of fixed size, mapped into this process.
#ifndef SUPEROFFLOAD_SERVER_MEMORY_SHARED_MEMORY_H_
#define SUPEROFFLOAD_SERVER_MEMORY_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/memory/binding.h"
#include "superoffload/v1/file_descriptor.h"

namespace superoffload::memory {

using superoffload::FileDescriptor;

// A memfd sealed against growing, shrinking and further seals, zero-filled, with every page allocated at creation, so
// that no later write can fault for want of memory.
class SharedMemory {
 public:
  // `name` shows in /proc/PID/maps. `bytes` is rounded up to whole pages. RESOURCE_EXHAUSTED when the kernel has
  // no memory for it; FAILED_PRECONDITION when it cannot lie where it should.
  static absl::StatusOr<SharedMemory> Create(const std::string& name, size_t bytes, const Binding& binding = {});

  // Maps what another process created, and returns its name with it. DATA_LOSS when the descriptor is of no sealed
  // memfd. After an error `fd` is still the caller's.
  static absl::StatusOr<std::pair<std::string, SharedMemory>> Open(FileDescriptor& fd);

  // Unmaps it and gives its descriptor away.
  FileDescriptor Release();

  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // By NUMA node, when it was created or opened; see BytesByNode.
  const std::map<int, uint64_t>& bytes_by_node() const { return bytes_by_node_; }

  // Read-write descriptor, owned by this object.
  int fd() const { return fd_.get(); }

  // A new descriptor of the same memory.
  absl::StatusOr<FileDescriptor> Duplicate() const;

  // The same, through which it can neither be written nor mapped writable and shared.
  absl::StatusOr<FileDescriptor> OpenReadOnly() const;

 private:
  static absl::StatusOr<SharedMemory> CreateWithPages(const std::string& name, size_t bytes, const Binding& binding,
                                                      bool huge);
  absl::Status Map(const std::string& name, size_t bytes);
  absl::Status Populate(const std::string& name);

  FileDescriptor fd_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  std::map<int, uint64_t> bytes_by_node_;
};

}  // namespace superoffload::memory

#endif  // SUPEROFFLOAD_SERVER_MEMORY_SHARED_MEMORY_H_
