#include "server/transport/descriptor_server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"

namespace superoffload::transport {
namespace {

using ::testing::HasSubstr;

class DescriptorServerTest : public ::testing::Test {
 protected:
  DescriptorServerTest() {
    char directory[] = "/tmp/superoffload-test-XXXXXX";
    path_ = std::string(::mkdtemp(directory)) + "/descriptors.sock";
    const memory::FileDescriptor opened(::open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    absl::StatusOr<std::unique_ptr<DescriptorServer>> server = DescriptorServer::Serve(
        *ListenOn(opened.get(), "descriptors.sock", path_, SOCK_SEQPACKET), path_, AccessPolicy{}, {},
        [](const Peer& peer, uint64_t epoch) -> absl::StatusOr<AttachmentDescriptors> {
          if (epoch != 5) return absl::NotFoundError("no such attachment; attach first");
          EXPECT_EQ(peer.uid, ::getuid());
          AttachmentDescriptors descriptors;
          for (size_t i = 0; i < descriptors.fds.size(); ++i) {
            absl::StatusOr<memory::SharedMemory> memory = memory::SharedMemory::Create("test", 4096);
            memory->data()[0] = std::byte(i + 1);
            descriptors.fds[i] = *memory->OpenReadOnly();
            descriptors.bytes[i] = 4096;
          }
          return descriptors;
        },
        [](const Peer&, uint64_t epoch, uint64_t number) -> absl::StatusOr<LentMemory> {
          if (epoch != 5 || number != 2) return absl::NotFoundError("no such memory; LendMemory lends some");
          absl::StatusOr<memory::SharedMemory> memory = memory::SharedMemory::Create("lent", 8192);
          memory->data()[8191] = std::byte{7};
          return LentMemory{memory->Release(), 8192};
        },
        [this](const Peer&, const superoffload_device_request& request, std::span<const int> descriptors) {
          if (request.slots == kSlowSlots) mapped_.WaitForNotification();
          std::string contents(descriptors.size(), '-');
          for (size_t i = 0; i < contents.size(); ++i) EXPECT_EQ(::pread(descriptors[i], &contents[i], 1, 0), 1);
          return absl::UnavailableError(
              absl::StrCat("no GPU for ", request.slots, " slots, descriptors hold \"", contents, "\""));
        },
        [this](const Peer& peer) {
          absl::MutexLock lock(&mu_);
          ended_.push_back(peer.session);
        });
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  ~DescriptorServerTest() override {
    server_.reset();
    ::unlink(path_.c_str());
    ::rmdir(path_.substr(0, path_.rfind('/')).c_str());
  }

  memory::FileDescriptor Connect() {
    memory::FileDescriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }

  static superoffload_socket_request Request(uint16_t kind, uint64_t epoch = 0) {
    superoffload_socket_request request{};
    request.magic = SUPEROFFLOAD_SOCKET_MAGIC;
    request.version = SUPEROFFLOAD_WIRE_VERSION;
    request.kind = kind;
    request.attachment_epoch = epoch;
    return request;
  }

  // The reply and the descriptors that came with it.
  static superoffload_socket_reply Exchange(int fd, const superoffload_socket_request& request,
                                            std::vector<memory::FileDescriptor>* descriptors = nullptr) {
    EXPECT_EQ(::send(fd, &request, sizeof(request), 0), static_cast<ssize_t>(sizeof(request)));
    superoffload_socket_reply reply{};
    iovec iov{&reply, sizeof(reply)};
    alignas(cmsghdr) char control[256];
    msghdr message{};
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    EXPECT_EQ(::recvmsg(fd, &message, 0), static_cast<ssize_t>(sizeof(reply)));
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
      const int* fds = reinterpret_cast<const int*>(CMSG_DATA(header));
      for (size_t i = 0; i < (header->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
        memory::FileDescriptor received(fds[i]);
        if (descriptors != nullptr) descriptors->push_back(std::move(received));
      }
    }
    return reply;
  }

  std::string Hello(int fd) {
    const superoffload_socket_reply reply = Exchange(fd, Request(SUPEROFFLOAD_SOCKET_HELLO));
    EXPECT_EQ(reply.kind, SUPEROFFLOAD_SOCKET_WELCOME);
    return std::string(reply.token, SUPEROFFLOAD_TOKEN_CHARACTERS);
  }

  void WaitEnded(size_t sessions) {
    absl::MutexLock lock(&mu_);
    auto enough = [&] {
      mu_.AssertHeld();
      return ended_.size() >= sessions;
    };
    mu_.Await(absl::Condition(&enough));
  }

  static constexpr uint32_t kSlowSlots = 11;  // of a GPU whose mapping takes long

  std::string path_;
  absl::Notification mapped_;
  absl::Mutex mu_;
  std::vector<uint64_t> ended_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<DescriptorServer> server_;
};

TEST_F(DescriptorServerTest, LentMemoryComesByItsNumber) {
  const memory::FileDescriptor fd = Connect();
  superoffload_socket_request request = Request(SUPEROFFLOAD_SOCKET_LENT_MEMORY, 5);
  request.lent_number = 2;
  std::vector<memory::FileDescriptor> descriptors;
  const superoffload_socket_reply reply = Exchange(fd.get(), request, &descriptors);
  EXPECT_EQ(reply.kind, SUPEROFFLOAD_SOCKET_LENT_MEMORY);
  EXPECT_EQ(reply.bytes[0], 8192u);
  ASSERT_EQ(descriptors.size(), 1u);
  char last = 0;
  EXPECT_EQ(::pread(descriptors[0].get(), &last, 1, 8191), 1);
  EXPECT_EQ(last, 7);
  request.lent_number = 3;
  EXPECT_EQ(Exchange(fd.get(), request).code, static_cast<uint32_t>(absl::StatusCode::kNotFound));
}

TEST_F(DescriptorServerTest, APeerThatAsksAgainBeforeItHasReadItsReplyIsDropped) {
  const memory::FileDescriptor fd = Connect();
  const superoffload_socket_request request = Request(SUPEROFFLOAD_SOCKET_DESCRIPTORS, 5);
  ASSERT_EQ(::send(fd.get(), &request, sizeof(request), 0), static_cast<ssize_t>(sizeof(request)));
  pollfd answered{fd.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&answered, 1, /*timeout=*/-1), 1);
  ASSERT_EQ(::send(fd.get(), &request, sizeof(request), 0), static_cast<ssize_t>(sizeof(request)));
  pollfd closed{fd.get(), POLLRDHUP, 0};
  EXPECT_EQ(::poll(&closed, 1, /*timeout=*/20'000), 1);
}

TEST_F(DescriptorServerTest, AClientOfAnotherReleaseLearnsBothVersions) {
  for (const int other : {SUPEROFFLOAD_WIRE_VERSION - 1, SUPEROFFLOAD_WIRE_VERSION + 1}) {
    const memory::FileDescriptor fd = Connect();
    superoffload_socket_request hello = Request(SUPEROFFLOAD_SOCKET_HELLO);
    hello.version = static_cast<uint16_t>(other);
    const superoffload_socket_reply reply = Exchange(fd.get(), hello);
    EXPECT_EQ(reply.kind, SUPEROFFLOAD_SOCKET_ERROR);
    EXPECT_EQ(reply.code, static_cast<uint32_t>(absl::StatusCode::kFailedPrecondition));
    EXPECT_THAT(reply.message, ::testing::HasSubstr("the same release of both"));
  }
}

TEST_F(DescriptorServerTest, ATokenLivesAsLongAsItsConnection) {
  std::string token;
  {
    const memory::FileDescriptor fd = Connect();
    token = Hello(fd.get());
    EXPECT_EQ(Hello(fd.get()), token);
    const absl::StatusOr<Peer> peer = server_->Authenticate(token);
    ASSERT_TRUE(peer.ok()) << peer.status();
    EXPECT_EQ(peer->uid, ::getuid());
    EXPECT_EQ(peer->pid, ::getpid());
  }
  WaitEnded(1);
  EXPECT_EQ(server_->Authenticate(token).status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(server_->Authenticate("").status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(DescriptorServerTest, PassesDescriptorsInOrder) {
  const memory::FileDescriptor fd = Connect();
  Hello(fd.get());
  std::vector<memory::FileDescriptor> descriptors;
  const superoffload_socket_reply reply = Exchange(fd.get(), Request(SUPEROFFLOAD_SOCKET_DESCRIPTORS, 5), &descriptors);
  EXPECT_EQ(reply.kind, SUPEROFFLOAD_SOCKET_DESCRIPTORS);
  ASSERT_EQ(descriptors.size(), static_cast<size_t>(SUPEROFFLOAD_DESCRIPTOR_COUNT));
  for (size_t i = 0; i < descriptors.size(); ++i) {
    char first = 0;
    EXPECT_EQ(::pread(descriptors[i].get(), &first, 1, 0), 1);
    EXPECT_EQ(first, static_cast<char>(i + 1));
    EXPECT_EQ(reply.bytes[i], 4096u);
  }
}

TEST_F(DescriptorServerTest, ErrorsLeaveTheConnectionOpen) {
  const memory::FileDescriptor fd = Connect();
  superoffload_socket_reply reply = Exchange(fd.get(), Request(SUPEROFFLOAD_SOCKET_DESCRIPTORS, 6));
  EXPECT_EQ(reply.kind, SUPEROFFLOAD_SOCKET_ERROR);
  EXPECT_EQ(reply.code, static_cast<uint32_t>(absl::StatusCode::kNotFound));
  EXPECT_THAT(reply.message, HasSubstr("attach first"));
  reply = Exchange(fd.get(), Request(99));
  EXPECT_EQ(reply.code, static_cast<uint32_t>(absl::StatusCode::kUnimplemented));
  Hello(fd.get());
}

TEST_F(DescriptorServerTest, GpuMemoryComesWithTheDescriptorsOfItsPiecesInTheirOrder) {
  const memory::FileDescriptor fd = Connect();
  Hello(fd.get());
  superoffload_device_request request{};
  request.header = Request(SUPEROFFLOAD_SOCKET_DEVICE_MEMORY, 5);
  request.slots = 3;
  std::vector<memory::SharedMemory> pieces;
  for (const char content : {'x', 'y'}) {
    pieces.push_back(*memory::SharedMemory::Create("gpu", 4096));
    pieces.back().data()[0] = static_cast<std::byte>(content);
  }
  constexpr size_t kMost = SUPEROFFLOAD_MAX_DEVICE_PIECES;
  for (const size_t count : {size_t{0}, size_t{1}, size_t{3}, kMost, kMost + 1}) {  // one too many is dropped
    std::string expected;
    std::vector<int> fds;
    for (size_t i = 0; i < count; ++i) {
      fds.push_back(pieces[i % 2].fd());
      if (i < kMost) expected += "xy"[i % 2];
    }
    iovec iov{&request, sizeof(request)};
    alignas(cmsghdr) char control[CMSG_SPACE((kMost + 1) * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    if (count > 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(count * sizeof(int));
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(count * sizeof(int));
      std::memcpy(CMSG_DATA(header), fds.data(), count * sizeof(int));
    }
    ASSERT_EQ(::sendmsg(fd.get(), &message, 0), static_cast<ssize_t>(sizeof(request)));
    superoffload_socket_reply reply{};
    ASSERT_EQ(::recv(fd.get(), &reply, sizeof(reply), 0), static_cast<ssize_t>(sizeof(reply)));
    EXPECT_EQ(reply.code, static_cast<uint32_t>(absl::StatusCode::kUnavailable));
    EXPECT_THAT(reply.message, HasSubstr("no GPU for 3 slots, descriptors hold \"" + expected + "\""));
  }
  Hello(fd.get());
}

TEST_F(DescriptorServerTest, OthersAreServedWhileGpuMemoryIsMapped) {
  superoffload_device_request request{};
  request.header = Request(SUPEROFFLOAD_SOCKET_DEVICE_MEMORY, 5);
  request.slots = kSlowSlots;
  memory::FileDescriptor gone = Connect();
  const memory::FileDescriptor stays = Connect(), other = Connect();
  for (const int fd : {gone.get(), stays.get()}) {
    ASSERT_EQ(::send(fd, &request, sizeof(request), 0), static_cast<ssize_t>(sizeof(request)));
  }
  gone = {};
  Hello(other.get());
  mapped_.Notify();
  superoffload_socket_reply reply{};
  ASSERT_EQ(::recv(stays.get(), &reply, sizeof(reply), 0), static_cast<ssize_t>(sizeof(reply)));
  EXPECT_THAT(reply.message, HasSubstr("no GPU for 11 slots"));
  Hello(stays.get());
}

TEST_F(DescriptorServerTest, GarbageIsAnsweredAndTheServerServesOn) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    const memory::FileDescriptor fd = Connect();
    std::vector<char> garbage(random() % 700);
    for (char& byte : garbage) byte = static_cast<char>(random());
    ::send(fd.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
    if (random() % 2 == 0) continue;  // hang up without reading
    superoffload_socket_reply reply;
    const ssize_t received = ::recv(fd.get(), &reply, sizeof(reply), 0);
    if (received == static_cast<ssize_t>(sizeof(reply))) {
      EXPECT_EQ(reply.kind, SUPEROFFLOAD_SOCKET_ERROR);
    }
  }
  const memory::FileDescriptor fd = Connect();
  EXPECT_TRUE(server_->Authenticate(Hello(fd.get())).ok());
}

TEST_F(DescriptorServerTest, StoppingEndsEverySession) {
  const memory::FileDescriptor first = Connect(), second = Connect();
  Hello(first.get());
  Hello(second.get());
  server_.reset();
  WaitEnded(2);
}

}  // namespace
}  // namespace superoffload::transport
