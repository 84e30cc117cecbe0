// The daemon's side of the descriptor socket and the rings, played by a test: it answers with whatever the test put
// into its members, right or wrong.
#ifndef SUPEROFFLOAD_TESTS_UNIT_CLIENT_FAKE_DAEMON_H_
#define SUPEROFFLOAD_TESTS_UNIT_CLIENT_FAKE_DAEMON_H_

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::client {

inline constexpr uint64_t kEpoch = 9;
inline constexpr uint32_t kRingEntries = 64;
inline constexpr uint32_t kBuckets = 3;
inline constexpr size_t kMemoryBytes = 4096;

class FakeDaemon {
 public:
  FakeDaemon() {
    std::string directory = std::filesystem::temp_directory_path() / "so-fake-XXXXXX";
    if (::mkdtemp(directory.data()) == nullptr) std::abort();
    directory_ = directory;
    listener_ = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path().c_str(), sizeof(address.sun_path) - 1);
    if (::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) std::abort();
    if (::listen(listener_, 1) != 0) std::abort();

    const size_t ring_bytes = SUPEROFFLOAD_RING_HEADER_BYTES + 2 * kRingEntries * sizeof(superoffload_ring_entry);
    for (size_t bytes : {ring_bytes, kMemoryBytes, kMemoryBytes, kMemoryBytes}) {
      descriptors.push_back(::memfd_create("fake", MFD_CLOEXEC));
      if (::ftruncate(descriptors.back(), static_cast<off_t>(bytes)) != 0) std::abort();
      reply.bytes[descriptors.size() - 1] = bytes;
    }
    header = static_cast<superoffload_ring_header*>(
        ::mmap(nullptr, ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptors[0], 0));
    header->magic = SUPEROFFLOAD_RING_MAGIC;
    header->version = SUPEROFFLOAD_RING_VERSION;
    header->submission_entries = header->completion_entries = kRingEntries;
    header->submission_offset = SUPEROFFLOAD_RING_HEADER_BYTES;
    header->completion_offset = SUPEROFFLOAD_RING_HEADER_BYTES + kRingEntries * sizeof(superoffload_ring_entry);
    header->attachment_epoch = kEpoch;

    welcome.magic = reply.magic = SUPEROFFLOAD_SOCKET_MAGIC;
    welcome.version = reply.version = SUPEROFFLOAD_WIRE_VERSION;
    welcome.kind = SUPEROFFLOAD_SOCKET_WELCOME;
    std::memset(welcome.token, 'a', sizeof(welcome.token));
    reply.kind = SUPEROFFLOAD_SOCKET_DESCRIPTORS;
    thread_ = std::thread([this] { Serve(); });
  }

  ~FakeDaemon() {
    Die();
    for (int fd : descriptors) ::close(fd);
    ::munmap(header, reply.bytes[0]);
    std::filesystem::remove_all(directory_);
  }

  std::string path() const { return directory_ + "/descriptors.sock"; }

  // Closes its sockets, as the death of a daemon does.
  void Die() {
    if (!thread_.joinable()) return;
    ::shutdown(listener_, SHUT_RDWR);
    if (const int fd = connection_.load(); fd >= 0) ::shutdown(fd, SHUT_RDWR);
    thread_.join();
    ::close(listener_);
  }

  void Complete(const superoffload_ring_entry& entry) {
    Entries(header->completion_offset)[header->completion_tail % kRingEntries] = entry;
    std::atomic_ref(header->completion_tail).store(header->completion_tail + 1);
  }

  std::vector<superoffload_ring_entry> TakeSubmissions() {
    std::vector<superoffload_ring_entry> taken;
    while (header->submission_head != std::atomic_ref(header->submission_tail).load()) {
      taken.push_back(Entries(header->submission_offset)[header->submission_head % kRingEntries]);
      std::atomic_ref(header->submission_head).store(header->submission_head + 1);
    }
    return taken;
  }

  superoffload_socket_reply welcome{};  // to HELLO
  superoffload_socket_reply reply{};    // to DESCRIPTORS
  std::chrono::milliseconds reply_delay{0};
  size_t reply_bytes = sizeof(superoffload_socket_reply);
  std::vector<int> descriptors;  // sent with it
  superoffload_ring_header* header;

 private:
  superoffload_ring_entry* Entries(uint64_t offset) {
    return reinterpret_cast<superoffload_ring_entry*>(reinterpret_cast<char*>(header) + offset);
  }

  void Serve() {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return;
    connection_ = fd;
    superoffload_socket_request request;
    while (::recv(fd, &request, sizeof(request), 0) > 0) {
      const bool hello = request.kind == SUPEROFFLOAD_SOCKET_HELLO;
      if (!hello) std::this_thread::sleep_for(reply_delay);
      Send(fd, hello ? welcome : reply, hello ? std::vector<int>() : descriptors);
    }
    ::close(fd);
    connection_ = -1;
  }

  void Send(int fd, superoffload_socket_reply message, const std::vector<int>& fds) {
    iovec iov{&message, reply_bytes};
    std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
    msghdr header{};
    header.msg_iov = &iov;
    header.msg_iovlen = 1;
    if (!fds.empty()) {
      header.msg_control = control.data();
      header.msg_controllen = control.size();
      cmsghdr* rights = CMSG_FIRSTHDR(&header);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
    }
    (void)::sendmsg(fd, &header, MSG_NOSIGNAL);
  }

  std::string directory_;
  int listener_ = -1;
  std::atomic<int> connection_{-1};
  std::thread thread_;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_TESTS_UNIT_CLIENT_FAKE_DAEMON_H_
