#include "server/host/connection_acceptor.h"

#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/server_credentials.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::host {
namespace {

std::string Find(const grpc::AuthMetadataProcessor::InputMetadata& metadata, const char* key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? "" : std::string(found->second.data(), found->second.size());
}

}  // namespace

// gRPC asks it once the metadata of a call is there, and receives no message of a call that it refuses.
class ConnectionAcceptor::ListenerGate final : public grpc::AuthMetadataProcessor {
 public:
  explicit ListenerGate(const Gate* gate) : gate_(gate) {}

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
  std::atomic<int64_t> uid_{-1};  // written before the listener's first connection is passed on
};

ConnectionAcceptor::ConnectionAcceptor(memory::FileDescriptor listener, std::unique_ptr<ConnectionRelay> relay,
                                       Gate gate, Allows allows, std::vector<grpc::ServerBuilder>& builders,
                                       grpc::ServerBuilder& strangers_builder)
    : acceptor_(std::move(listener)),
      stop_event_(::eventfd(0, EFD_CLOEXEC)),
      relay_(std::move(relay)),
      gate_(std::move(gate)),
      allows_(std::move(allows)) {
  for (grpc::ServerBuilder& builder : builders) listeners_.push_back(MakeListener(builder));
  strangers_ = MakeListener(strangers_builder);
}

ConnectionAcceptor::Listener ConnectionAcceptor::MakeListener(grpc::ServerBuilder& builder) {
  const auto gate_of_listener = std::make_shared<ListenerGate>(&gate_);  // gRPC's from here
  const auto credentials = grpc::experimental::LocalServerCredentials(UDS);
  credentials->SetAuthMetadataProcessor(gate_of_listener);
  return {gate_of_listener->uid(),
          builder.experimental().AddExternalConnectionAcceptor(
              grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials)};
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
  if (!fd.valid()) return;
  absl::StatusOr<memory::FileDescriptor> relayed = relay_->Add(std::move(fd), peer.uid);
  if (!relayed.ok()) return;
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
  connection.listener_fd = acceptor_.listener();
  connection.fd = relayed->Release();  // the server's from here
  ListenerOf(peer.uid).acceptor->HandleNewConnection(&connection);
}

ConnectionAcceptor::Listener& ConnectionAcceptor::ListenerOf(uid_t uid) {
  if (!allows_(uid)) return strangers_;
  for (size_t i = 0; i + 1 < listeners_.size(); ++i) {
    if (*listeners_[i].uid < 0) *listeners_[i].uid = uid;
    if (*listeners_[i].uid == uid) return listeners_[i];
  }
  return listeners_.back();
}

}  // namespace superoffload::host
