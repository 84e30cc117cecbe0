// Owns a file descriptor: what daemon and client send each other over the descriptor socket.
#ifndef SUPEROFFLOAD_V1_FILE_DESCRIPTOR_H_
#define SUPEROFFLOAD_V1_FILE_DESCRIPTOR_H_

#include <unistd.h>

#include <utility>

namespace superoffload {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.Release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      Close();
      fd_ = other.Release();
    }
    return *this;
  }
  ~FileDescriptor() { Close(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

  // The caller closes it.
  int Release() { return std::exchange(fd_, -1); }

 private:
  void Close() {
    if (fd_ >= 0) ::close(fd_);
  }

  int fd_ = -1;
};

}  // namespace superoffload

#endif  // SUPEROFFLOAD_V1_FILE_DESCRIPTOR_H_
