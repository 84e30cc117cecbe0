// The trainer's end of the descriptor socket (proto/superoffload/v1/descriptor_socket.h). A process has one for all its
// attachments to a daemon, in whatever threads they are made.
#ifndef SUPEROFFLOAD_CLIENT_SRC_DESCRIPTOR_CONNECTION_H_
#define SUPEROFFLOAD_CLIENT_SRC_DESCRIPTOR_CONNECTION_H_

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "client/src/status.h"
#include "superoffload/v1/descriptor_socket.h"
#include "superoffload/v1/file_descriptor.h"

namespace superoffload::client {

struct AttachmentFiles {
  std::array<FileDescriptor, SUPEROFFLOAD_DESCRIPTOR_COUNT> fds;
  std::array<size_t, SUPEROFFLOAD_DESCRIPTOR_COUNT> bytes;
};

// Thread-safe: one exchange goes on at a time, and others wait for its end.
class DescriptorConnection {
 public:
  // Connects and says HELLO. UNAVAILABLE: nobody listens at `path`. Shared, as attachments may outlive the handle
  // through which they were made.
  static Status Connect(const std::string& path, std::shared_ptr<DescriptorConnection>* connection);

  const std::string& token() const { return token_; }

  // The memory of an attachment that was made with the token. Every file is at least as large as stated.
  Status Fetch(uint64_t attachment_epoch, AttachmentFiles* files);

  // Memory that LendMemory has lent to it, and its bytes.
  Status FetchLent(uint64_t attachment_epoch, uint64_t number, FileDescriptor* file, size_t* bytes);

  // Has the daemon map GPU memory for such an attachment; fills in the request's header. The `descriptors` go with
  // it, at most SUPEROFFLOAD_MAX_DEVICE_PIECES, and stay the caller's. Errors are the daemon's.
  Status ShareDevice(uint64_t attachment_epoch, superoffload_device_request* request, std::span<const int> descriptors);

  // Whether the daemon has closed its end or died, or this end is closed.
  bool DaemonGone() const;

  // Ends the conversation, and with it every attachment made through it.
  void Close();

 private:
  explicit DescriptorConnection(FileDescriptor socket) : socket_(std::move(socket)) {}
  // Sends a request of `bytes`, whose answer comes with as many `files`.
  Status Exchange(const void* request, size_t bytes, std::span<const int> descriptors,
                  superoffload_socket_kind expected, superoffload_socket_reply* reply,
                  std::span<FileDescriptor> files = {});

  const FileDescriptor socket_;
  std::mutex exchange_;  // replies do not say to which request they belong
  std::string token_;    // does not change once Connect() has returned
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_DESCRIPTOR_CONNECTION_H_
