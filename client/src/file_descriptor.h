// Owners of a file descriptor and of a mapping.
#ifndef SUPEROFFLOAD_CLIENT_SRC_FILE_DESCRIPTOR_H_
#define SUPEROFFLOAD_CLIENT_SRC_FILE_DESCRIPTOR_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <utility>

namespace superoffload::client {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

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

#endif  // SUPEROFFLOAD_CLIENT_SRC_FILE_DESCRIPTOR_H_
