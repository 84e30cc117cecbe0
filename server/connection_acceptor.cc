#include "server/connection_acceptor.h"

#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/server_credentials.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "superoffload/v1/descriptor_socket.h"

namespace superoffload {
namespace {

std::string Find(const grpc::AuthMetadataProcessor::InputMetadata& metadata, const char* key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? "" : std::string(found->second.data(), found->second.size());
}

bool IsOpen(int fd, ino_t inode) {
  struct stat file {};
  return ::fstat(fd, &file) == 0 && S_ISSOCK(file.st_mode) && file.st_ino == inode;
}

}  // namespace

// gRPC asks it once the metadata of a call is there, and receives no message of a call that it refuses.
class ConnectionAcceptor::LaneGate final : public grpc::AuthMetadataProcessor {
 public:
  explicit LaneGate(const Gate* gate) : gate_(gate) {}

  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext*, OutputMetadata*, OutputMetadata*) override {
    const int64_t uid = uid_;
    const absl::Status status = (*gate_)(uid < 0 ? std::nullopt : std::optional<uid_t>(static_cast<uid_t>(uid)),
                                         Find(metadata, ":path"), Find(metadata, SUPEROFFLOAD_TOKEN_METADATA_KEY));
    return {static_cast<grpc::StatusCode>(status.raw_code()), std::string(status.message())};
  }

  std::atomic<int64_t>* uid() { return &uid_; }

 private:
  const Gate* const gate_;
  std::atomic<int64_t> uid_{-1};  // written before the lane's first connection is handed over
};

ConnectionAcceptor::ConnectionAcceptor(memory::FileDescriptor listener, const transport::ConnectionLimits& limits,
                                       Gate gate, grpc::ServerBuilder& builder)
    : acceptor_(std::move(listener)),
      stop_event_(::eventfd(0, EFD_CLOEXEC)),
      limits_(limits),
      gate_(std::move(gate)) {
  for (size_t i = 0; i < kLanes; ++i) {
    const auto lane_gate = std::make_shared<LaneGate>(&gate_);  // gRPC's from here
    const auto credentials = grpc::experimental::LocalServerCredentials(UDS);
    credentials->SetAuthMetadataProcessor(lane_gate);
    lanes_.push_back({lane_gate->uid(),
                      builder.experimental().AddExternalConnectionAcceptor(
                          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials)});
  }
}

ConnectionAcceptor::~ConnectionAcceptor() {
  const uint64_t one = 1;
  (void)!::write(stop_event_.get(), &one, sizeof(one));
  if (thread_.joinable()) thread_.join();
}

void ConnectionAcceptor::Start() {
  thread_ = std::thread([this] { Run(); });
  pthread_setname_np(thread_.native_handle(), "so-accept");
}

void ConnectionAcceptor::Run() {
  std::array<pollfd, 2> polled{pollfd{stop_event_.get(), POLLIN, 0}, pollfd{acceptor_.listener(), POLLIN, 0}};
  while (::poll(polled.data(), polled.size(), -1) >= 0 && polled[0].revents == 0) Accept();
}

void ConnectionAcceptor::Accept() {
  ucred peer{};
  memory::FileDescriptor fd = acceptor_.Accept(&peer);
  struct stat file {};
  if (!fd.valid() || ::fstat(fd.get(), &file) != 0 || !MayConnect(peer.uid)) return;
  handed_[peer.uid].push_back({fd.get(), file.st_ino});
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
  connection.listener_fd = acceptor_.listener();
  connection.fd = fd.Release();  // the server's from here
  LaneOf(peer.uid).acceptor->HandleNewConnection(&connection);
}

bool ConnectionAcceptor::MayConnect(uid_t uid) {
  size_t total = 0;
  for (const auto& [user, handed] : handed_) total += handed.size();
  if (handed_[uid].size() < limits_.per_user && total < limits_.total) return true;
  total = 0;
  for (auto& [user, handed] : handed_) {
    std::erase_if(handed, [](const Handed& connection) { return !IsOpen(connection.fd, connection.inode); });
    total += handed.size();
  }
  return uid == 0 || (handed_[uid].size() < limits_.per_user && total < limits_.total);
}

ConnectionAcceptor::Lane& ConnectionAcceptor::LaneOf(uid_t uid) {
  for (size_t i = 0; i + 1 < lanes_.size(); ++i) {
    if (*lanes_[i].uid < 0) *lanes_[i].uid = uid;
    if (*lanes_[i].uid == uid) return lanes_[i];
  }
  return lanes_.back();
}

}  // namespace superoffload
