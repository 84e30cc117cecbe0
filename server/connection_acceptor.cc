#include "server/connection_acceptor.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <utility>

namespace superoffload {

ConnectionAcceptor::ConnectionAcceptor(memory::FileDescriptor listener, grpc::ServerBuilder& builder)
    : listener_(std::move(listener)),
      stop_event_(::eventfd(0, EFD_CLOEXEC)),
      acceptor_(builder.experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, grpc::InsecureServerCredentials())) {
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
  std::array<pollfd, 2> polled{pollfd{stop_event_.get(), POLLIN, 0}, pollfd{listener_.get(), POLLIN, 0}};
  while (::poll(polled.data(), polled.size(), -1) >= 0 && polled[0].revents == 0) {
    const int fd = ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) continue;  // whoever it was has gone
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = listener_.get();
    connection.fd = fd;  // the server's from here
    acceptor_->HandleNewConnection(&connection);
  }
}

}  // namespace superoffload
