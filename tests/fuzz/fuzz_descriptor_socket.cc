// The descriptor socket of a real server: packets of any size and content are answered or end their connection, and
// never anybody else's.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "server/transport/descriptor_server.h"

using namespace superoffload;

namespace {

class Server {
 public:
  Server() {
    std::string directory = std::filesystem::temp_directory_path() / "so-fuzz-XXXXXX";
    if (::mkdtemp(directory.data()) == nullptr) std::abort();
    path_ = directory + "/descriptors.sock";
    const memory::FileDescriptor opened(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    server_ = *transport::DescriptorServer::Serve(
        *transport::ListenOn(opened.get(), "descriptors.sock", path_, SOCK_SEQPACKET), path_, {}, {},
        [](const transport::Peer&, uint64_t) -> absl::StatusOr<transport::AttachmentDescriptors> {
          return absl::NotFoundError("no such attachment");
        },
        [](const transport::Peer&, uint64_t, uint64_t) -> absl::StatusOr<transport::LentMemory> {
          return absl::NotFoundError("no such memory");
        },
        [](const transport::Peer&, const superoffload_device_request&, std::span<const int>) {
          return absl::UnavailableError("no GPU");
        },
        [](const transport::Peer&) {});
    witness_ = Connect();
  }
  ~Server() {
    server_.reset();
    std::filesystem::remove_all(std::filesystem::path(path_).parent_path());
  }

  memory::FileDescriptor Connect() const {
    memory::FileDescriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    if (TEMP_FAILURE_RETRY(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address))) != 0) {
      std::abort();
    }
    return fd;
  }

  // A well-behaved connection must be served all the while. The fuzzer's clock interrupts calls that wait.
  void CheckWitness() const {
    superoffload_socket_request hello{};
    hello.magic = SUPEROFFLOAD_SOCKET_MAGIC;
    hello.version = SUPEROFFLOAD_WIRE_VERSION;
    hello.kind = SUPEROFFLOAD_SOCKET_HELLO;
    superoffload_socket_reply reply{};
    if (TEMP_FAILURE_RETRY(::send(witness_.get(), &hello, sizeof(hello), MSG_NOSIGNAL)) != sizeof(hello) ||
        TEMP_FAILURE_RETRY(::recv(witness_.get(), &reply, sizeof(reply), 0)) != sizeof(reply) ||
        reply.kind != SUPEROFFLOAD_SOCKET_WELCOME) {
      std::abort();
    }
  }

 private:
  std::string path_;
  std::unique_ptr<transport::DescriptorServer> server_;
  memory::FileDescriptor witness_;
};

}  // namespace

// The input: packets, each with its length in the two bytes before it.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Server server;
  const memory::FileDescriptor fd = server.Connect();
  while (size >= 2) {
    const size_t length = std::min<size_t>(data[0] | data[1] << 8, size - 2);
    if (::send(fd.get(), data + 2, length, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) break;
    data += 2 + length;
    size -= 2 + length;
    superoffload_socket_reply reply;
    const ssize_t got = TEMP_FAILURE_RETRY(::recv(fd.get(), &reply, sizeof(reply), 0));
    if (got <= 0) break;  // it was closed
    if (got != sizeof(reply) || reply.magic != SUPEROFFLOAD_SOCKET_MAGIC) std::abort();
    if (reply.kind == SUPEROFFLOAD_SOCKET_ERROR && std::memchr(reply.message, 0, sizeof(reply.message)) == nullptr) {
      std::abort();
    }
  }
  server.CheckWitness();
  return 0;
}
