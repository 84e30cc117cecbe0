#include "server/host/connection_relay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>

#include "tests/unit/server/host/http2_bytes.h"

namespace superoffload::host {
namespace {

using memory::FileDescriptor;
using ::testing::HasSubstr;

constexpr uid_t kAnna = 1001;
constexpr uid_t kBert = 1002;
constexpr CallLimits kFew{.calls = 3, .frames = 5, .open_calls = 4, .header_bytes = 100};

std::string Call(uint32_t stream) { return Http2Bytes(1, 4, stream, "h"); }

class ConnectionRelayTest : public ::testing::Test {
 protected:
  // Two ends of a relayed connection.
  struct Ends {
    FileDescriptor client;
    FileDescriptor server;
  };

  explicit ConnectionRelayTest(const transport::ConnectionLimits& connections = {.per_user = 3, .total = 8},
                               const CallLimits& calls = kFew)
      : relay_(*ConnectionRelay::Start(connections, calls, [this] { return absl::FromUnixMillis(milliseconds_); })) {}

  absl::StatusOr<Ends> TryConnect(uid_t uid) {
    int pair[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    FileDescriptor client(pair[0]);
    absl::StatusOr<FileDescriptor> server = relay_->Add(FileDescriptor(pair[1]), uid);
    if (!server.ok()) return server.status();
    return Ends{std::move(client), *std::move(server)};
  }

  // Of a client that has said what it is.
  Ends Connect(uid_t uid) {
    absl::StatusOr<Ends> ends = TryConnect(uid);
    EXPECT_TRUE(ends.ok()) << ends.status();
    Send(ends->client, kHttp2Preface);
    EXPECT_EQ(Receive(ends->server, kHttp2Preface.size()), kHttp2Preface);
    return *std::move(ends);
  }

  static void Send(const FileDescriptor& to, const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t count = ::send(to.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (count < 0 && errno == EAGAIN) {
        Await(to, POLLOUT);
        continue;
      }
      ASSERT_GT(count, 0) << std::strerror(errno);
      sent += static_cast<size_t>(count);
    }
  }

  static void Await(const FileDescriptor& fd, short events) {
    pollfd polled{fd.get(), events, 0};
    ASSERT_EQ(::poll(&polled, 1, 60'000), 1);
  }

  // So many bytes, or fewer at the end of the connection.
  static std::string Receive(const FileDescriptor& from, size_t bytes) {
    std::string received(bytes, '\0');
    size_t got = 0;
    while (got < bytes) {
      Await(from, POLLIN);
      const ssize_t count = ::recv(from.get(), received.data() + got, bytes - got, MSG_DONTWAIT);
      if (count <= 0) break;
      got += static_cast<size_t>(count);
    }
    received.resize(got);
    return received;
  }

  static bool Ended(const FileDescriptor& from) { return Receive(from, 1).empty(); }

  // What has arrived until the relay has looked at the connection ten times more.
  static std::string Arrived(const FileDescriptor& from) {
    absl::SleepFor(absl::Milliseconds(100));
    std::string received(1 << 16, '\0');
    const ssize_t count = ::recv(from.get(), received.data(), received.size(), MSG_DONTWAIT);
    received.resize(count > 0 ? static_cast<size_t>(count) : 0);
    return received;
  }

  std::atomic<int64_t> milliseconds_{1'000'000};  // the relay's clock
  std::unique_ptr<ConnectionRelay> relay_;
};

class LavishConnectionRelayTest : public ConnectionRelayTest {
 protected:
  LavishConnectionRelayTest() : ConnectionRelayTest({}, {.calls = 1e9, .frames = 1e9}) {}
};

TEST_F(LavishConnectionRelayTest, EveryByteArrivesInBothDirectionsHoweverSlowlyItIsRead) {
  std::mt19937 random(3);
  std::string request, answer;
  for (uint32_t stream = 1; stream < 200; stream += 2) {
    request += Call(stream) + Http2Bytes(0, 1, stream, std::string(random() % 30'000, 'r'));
    answer += Http2Bytes(1, 4, stream, "a") + Http2Bytes(0, 0, stream, std::string(random() % 30'000, 'a')) +
              Http2Bytes(1, 5, stream, "e");
  }
  const Ends ends = Connect(kAnna);
  std::thread client([&] { Send(ends.client, request); });
  std::thread server([&] { Send(ends.server, answer); });
  absl::SleepFor(absl::Milliseconds(20));  // all buffers are full
  EXPECT_EQ(Receive(ends.server, request.size()), request);
  EXPECT_EQ(Receive(ends.client, answer.size()), answer);
  client.join();
  server.join();
}

TEST_F(ConnectionRelayTest, TheEndOfEitherSideIsThatOfTheOther) {
  Ends first = Connect(kAnna);
  Send(first.client, Call(1));
  first.client = FileDescriptor();
  EXPECT_EQ(Receive(first.server, 100), Call(1));
  EXPECT_TRUE(Ended(first.server));

  Ends second = Connect(kAnna);
  Send(second.server, "goodbye-- which is nine bytes and more");
  second.server = FileDescriptor();
  EXPECT_THAT(Receive(second.client, 100), HasSubstr("goodbye"));
  EXPECT_TRUE(Ended(second.client));
}

TEST_F(ConnectionRelayTest, CallsThatComeTooFastWaitAndNoneIsLost) {
  const Ends ends = Connect(kAnna);
  std::string all;
  for (uint32_t stream = 1; stream < 40; stream += 2) all += Call(stream) + Http2Bytes(3, 0, stream, "down");
  Send(ends.client, all);
  std::string arrived = Arrived(ends.server);
  EXPECT_EQ(arrived, all.substr(0, arrived.size()));
  EXPECT_EQ(arrived.size(), 3 * (Call(1).size() + 13));
  while (arrived.size() < all.size()) {
    milliseconds_ += 1000;  // three more
    const std::string more =
        Receive(ends.server, std::min<size_t>(all.size() - arrived.size(), 3 * (Call(1).size() + 13)));
    ASSERT_FALSE(more.empty());
    arrived += more;
  }
  EXPECT_EQ(arrived, all);
}

TEST_F(ConnectionRelayTest, OtherFramesWaitAsWellAndOneUserForNoOther) {
  const Ends anna = Connect(kAnna);
  const Ends bert = Connect(kBert);
  std::string pings;
  for (int i = 0; i < 20; ++i) pings += Http2Bytes(6, 0, 0, "12345678");
  Send(anna.client, pings);
  EXPECT_EQ(Arrived(anna.server).size(), 5 * 17u);
  Send(bert.client, Call(1));
  EXPECT_EQ(Receive(bert.server, Call(1).size()), Call(1));
}

TEST_F(ConnectionRelayTest, AllConnectionsOfAUserHaveOneAllowance) {
  const Ends one = Connect(kAnna);
  const Ends two = Connect(kAnna);
  Send(one.client, Call(1) + Call(3));
  EXPECT_EQ(Receive(one.server, 2 * Call(1).size()), Call(1) + Call(3));
  Send(two.client, Call(1) + Call(3));
  EXPECT_EQ(Arrived(two.server), Call(1));
}

TEST_F(ConnectionRelayTest, AUserWithTooManyOpenCallsLosesTheConnectionThatOpensMore) {
  const Ends ends = Connect(kAnna);
  Send(ends.client, Call(1) + Call(3));
  EXPECT_EQ(Receive(ends.server, 2 * Call(1).size()), Call(1) + Call(3));
  Send(ends.server, Http2Bytes(1, 5, 1, "trailers"));  // the first one is over
  EXPECT_EQ(Receive(ends.client, 17).size(), 17u);
  milliseconds_ += 1000;
  Send(ends.client, Call(5) + Call(7) + Call(9));
  EXPECT_EQ(Receive(ends.server, 3 * Call(1).size()), Call(5) + Call(7) + Call(9));  // four are open
  milliseconds_ += 1000;
  Send(ends.client, Call(11));
  EXPECT_TRUE(Ended(ends.server));
  EXPECT_TRUE(Ended(ends.client));

  const Ends next = Connect(kAnna);  // those of the ended connection count no more
  Send(next.client, Call(1));
  EXPECT_EQ(Receive(next.server, Call(1).size()), Call(1));
}

TEST_F(ConnectionRelayTest, HeadersWithoutEndEndTheConnection) {
  const Ends ends = Connect(kAnna);
  Send(ends.client, Http2Bytes(1, 0, 1, std::string(60, 'h')));
  EXPECT_EQ(Receive(ends.server, 69).size(), 69u);
  Send(ends.client, Http2Bytes(9, 0, 1, std::string(60, 'h')));
  EXPECT_TRUE(Ended(ends.client));
}

TEST_F(ConnectionRelayTest, AUserHasSoManyConnectionsAndTheLastAreForThoseWhoHaveFew) {
  std::vector<Ends> held;
  for (int i = 0; i < 3; ++i) held.push_back(Connect(kAnna));
  EXPECT_THAT(TryConnect(kAnna).status().message(), HasSubstr("has 3 connections"));
  for (int i = 0; i < 3; ++i) held.push_back(Connect(kBert));
  for (uid_t uid : {2001u, 2002u}) held.push_back(Connect(uid));
  EXPECT_EQ(TryConnect(2003).status().code(), absl::StatusCode::kResourceExhausted);
  held.push_back(Connect(/*root*/ 0));
  held.erase(held.begin(), held.begin() + 2);
  absl::StatusOr<Ends> freed = TryConnect(2003);
  for (int i = 0; i < 1000 && !freed.ok(); ++i) {  // the relay sees the end a little later
    absl::SleepFor(absl::Milliseconds(10));
    freed = TryConnect(2003);
  }
  EXPECT_TRUE(freed.ok()) << freed.status();
}

TEST(ConnectionLimitsTest, TheLastQuarterIsForThoseWhoHaveNextToNone) {
  const transport::ConnectionLimits limits{.per_user = 10, .total = 40};
  EXPECT_TRUE(limits.Admits(kAnna, 9, 29));
  EXPECT_FALSE(limits.Admits(kAnna, 10, 10));
  EXPECT_FALSE(limits.Admits(kAnna, 9, 30));
  EXPECT_TRUE(limits.Admits(kAnna, 3, 39));
  EXPECT_FALSE(limits.Admits(kAnna, 0, 40));
  EXPECT_TRUE(limits.Admits(/*root*/ 0, 9, 1000));
}

}  // namespace
}  // namespace superoffload::host
