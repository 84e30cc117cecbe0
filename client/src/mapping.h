// Owns memory that is mapped.
#ifndef SUPEROFFLOAD_CLIENT_SRC_MAPPING_H_
#define SUPEROFFLOAD_CLIENT_SRC_MAPPING_H_

#include <sys/mman.h>

#include <cstddef>
#include <utility>

namespace superoffload::client {

class Mapping {
 public:
  Mapping() = default;
  Mapping(void* data, size_t bytes) : data_(data), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_MAPPING_H_
