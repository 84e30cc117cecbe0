// What handing a bucket over costs: the round trip of a step with one tiny bucket through the real daemon's rings
// (BEGIN_STEP, GRADIENT_READY, END_STEP; VERDICT, PARAMETERS_READY; the update itself is 64 elements), against the
// least that two processes need to answer each other, a futex ping-pong, and against what a message over gRPC needs, a
// bare bidirectional stream over a unix socket.
//
//   submit_bench [--rounds=20000]
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "superoffload/client.hpp"
#include "superoffload/v1/exit_status.h"
#include "tests/support/daemon_process.h"

ABSL_FLAG(int, rounds, 20000, "round trips measured of each kind");

namespace superoffload {
namespace {

using Clock = std::chrono::steady_clock;

struct Percentiles {
  double p50_us, p99_us;
};

Percentiles Measure(int rounds, const std::function<void()>& round_trip) {
  for (int i = 0; i < rounds / 10; ++i) round_trip();
  std::vector<double> us(rounds);
  for (double& sample : us) {
    const auto begin = Clock::now();
    round_trip();
    sample = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  }
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us[us.size() * 99 / 100]};
}

// Two processes and two words; each side spins as briefly as the rings do before it sleeps.
class FutexPingPong {
 public:
  FutexPingPong()
      : words_(static_cast<std::atomic<uint32_t>*>(
            ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    peer_ = ::fork();
    if (peer_ != 0) return;
    for (uint32_t turn = 1;; ++turn) {
      Await(0, turn);
      Post(1, turn);
    }
  }
  ~FutexPingPong() {
    ::kill(peer_, SIGKILL);
    ::waitpid(peer_, nullptr, 0);
    ::munmap(words_, 4096);
  }

  void RoundTrip() {
    ++turn_;
    Post(0, turn_);
    Await(1, turn_);
  }

 private:
  std::atomic<uint32_t>& Word(int side) { return words_[side * 16]; }  // a cache line each
  void Post(int side, uint32_t turn) {
    Word(side).store(turn);
    ::syscall(SYS_futex, &Word(side), FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }
  void Await(int side, uint32_t turn) {
    for (int spins = 0; Word(side).load() != turn; ++spins) {
      if (spins > 200) ::syscall(SYS_futex, &Word(side), FUTEX_WAIT, turn - 1, nullptr, nullptr, 0);
    }
  }

  std::atomic<uint32_t>* const words_;
  pid_t peer_;
  uint32_t turn_ = 0;
};

// Answers every message with itself.
class EchoService final : public grpc::CallbackGenericService {
  class Reactor final : public grpc::ServerGenericBidiReactor {
   public:
    Reactor() { StartRead(&message_); }
    void OnReadDone(bool ok) override { ok ? StartWrite(&message_) : Finish(grpc::Status::OK); }
    void OnWriteDone(bool ok) override {
      if (ok) StartRead(&message_);
    }
    void OnDone() override { delete this; }

   private:
    grpc::ByteBuffer message_;
  };
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override { return new Reactor; }
};

class EchoClient final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit EchoClient(const std::shared_ptr<grpc::Channel>& channel) : stub_(channel) {
    stub_.PrepareBidiStreamingCall(&context_, "/Echo/Echo", {}, this);
    const grpc::Slice slice(std::string(64, 'x'));  // as long as a ring entry
    request_ = grpc::ByteBuffer(&slice, 1);
    StartCall();
  }
  ~EchoClient() override {
    context_.TryCancel();
    Await(done_);
  }

  void RoundTrip() {
    StartRead(&reply_);
    StartWrite(&request_);
    Await(answered_);
    Await(written_);  // the callback may come after the answer
    answered_ = written_ = false;
  }

 private:
  void OnReadDone(bool) override { Signal(answered_); }
  void OnWriteDone(bool) override { Signal(written_); }
  void OnDone(const grpc::Status&) override { Signal(done_); }
  void Signal(bool& flag) {
    std::lock_guard lock(mu_);
    flag = true;
    changed_.notify_one();
  }
  void Await(bool& flag) {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [&] { return flag; });
  }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer request_, reply_;
  std::mutex mu_;
  std::condition_variable changed_;
  bool answered_ = false, written_ = false, done_ = false;
};

Percentiles MeasureStream(int rounds, const std::string& address) {
  EchoService service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  builder.RegisterCallbackGenericService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  EchoClient client(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  return Measure(rounds, [&] { client.RoundTrip(); });
}

// `buckets` buckets of 1024 elements, each in one step.
Percentiles MeasureStep(int rounds, Client& client, int buckets) {
  v1::CreateOptimizerRequest request;
  request.set_name("bench-" + std::to_string(buckets));
  request.set_bucket_bytes(4096);
  request.set_algorithm("adamw");
  v1::ParameterGroup* group = request.add_groups();
  SetScalar(group, "lr", 1e-3);
  SetScalar(group, "weight_decay", 0);
  for (int i = 0; i < buckets; ++i) {
    v1::Parameter* parameter = request.add_parameters();
    parameter->set_name("w" + std::to_string(i));
    parameter->add_shape(buckets == 1 ? 64 : 1024);
    parameter->set_dtype(v1::DATA_TYPE_FLOAT32);
  }
  if (!client.CreateOptimizer(request).ok()) std::abort();
  v1::AttachOptimizerRequest attach;
  attach.set_name(request.name());
  attach.set_sync(v1::SYNC_PUSH);
  const auto trainer = client.Attach(attach);
  if (!trainer.ok() || !(*trainer)->PushParameters().ok()) std::abort();
  return Measure(rounds, [&] {
    bool ok = (*trainer)->BeginStep().ok();
    for (int i = 0; i < buckets; ++i) ok = ok && (*trainer)->GradientReady(i).ok();
    if (!ok || !(*trainer)->EndStep().ok() || !(*trainer)->WaitStep().ok()) std::abort();
  });
}

int Main() {
  const int rounds = absl::GetFlag(FLAGS_rounds);
  Percentiles futex;
  {
    FutexPingPong ping_pong;  // forks: before gRPC has threads
    futex = Measure(rounds, [&] { ping_pong.RoundTrip(); });
  }
  test::DaemonProcess daemon;
  const Percentiles stream = MeasureStream(rounds, daemon.endpoint() + ".echo");
  const auto client = Client::Connect(daemon.endpoint());
  if (!client.ok()) {
    std::fprintf(stderr, "submit_bench: %s\n", client.status().ToString().c_str());
    return 1;
  }
  const Percentiles one = MeasureStep(rounds, **client, 1);
  constexpr int kManyBuckets = 64;
  const Percentiles many = MeasureStep(rounds / 10, **client, kManyBuckets);
  std::printf("%-44s %9s %9s %14s %14s\n", "round trip", "p50 us", "p99 us", "p50 / futex", "p50 / stream");
  const auto row = [&](const char* name, const Percentiles& p) {
    std::printf("%-44s %9.2f %9.2f %14.2f %14.2f\n", name, p.p50_us, p.p99_us, p.p50_us / futex.p50_us,
                p.p50_us / stream.p50_us);
  };
  row("futex ping-pong", futex);
  row("gRPC stream over a unix socket", stream);
  row("step of one bucket of 64 elements", one);
  row("each further bucket of 1024 elements",
      {(many.p50_us - one.p50_us) / (kManyBuckets - 1), (many.p99_us - one.p99_us) / (kManyBuckets - 1)});
  return 0;
}

}  // namespace
}  // namespace superoffload

int main(int argc, char** argv) {
  superoffload::EndWithZeroAfterHelp(argc, argv);
  absl::ParseCommandLine(argc, argv);
  return superoffload::Main();
}
