// client.hpp: the C++ interface of trainers and tools to superoffloadd, over superoffload.h and gRPC.
//
//   auto client = superoffload::Client::Connect();
//   (*client)->CreateOptimizer(request);                    // once; the optimizer outlives the process
//   auto attachment = (*client)->Attach(attach_request);    // SYNC_PUSH: write the parameters, then PushParameters
//   per step:
//     attachment->BeginStep();
//     backward pass: write attachment->Gradient<T>(i), then attachment->GradientReady(i), in any order
//     attachment->EndStep(1.0, max_grad_norm);
//     attachment->WaitStep();                               // Parameter<T>(i) now holds the new parameters
//
// client/examples/train_bigram.cc is a whole trainer. Errors are absl::Status with the daemon's canonical codes and
// sentences (optimizer.proto says which call can fail how). Nothing here throws.
#ifndef SUPEROFFLOAD_CLIENT_HPP_
#define SUPEROFFLOAD_CLIENT_HPP_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "superoffload/superoffload.h"
#include "superoffload/superoffload_gpu.h"
#include "superoffload/v1/optimizer.grpc.pb.h"

namespace superoffload {

// Where a daemon listens: `endpoint` ("unix:/path" or a path) when it is not empty, else $SUPEROFFLOAD_ENDPOINT, else
// the first of $XDG_RUNTIME_DIR/superoffloadd, /run/superoffloadd and /tmp/superoffloadd-UID that has a control.sock.
// {local_rank} in what is given is this process's. Where there are daemons of several Superchips (/run/superoffloadd-0,
// -1, ...), it is that of the Superchip to whose CPUs this process is bound. UNAVAILABLE: there is none.
absl::StatusOr<std::string> ResolveEndpoint(const std::string& endpoint);

// Of all daemons of this machine that are where they are by default.
std::vector<std::string> MachineEndpoints();

// Gives a hyper-parameter of a group a value, by the algorithm's name for it ("lr").
void SetScalar(v1::ParameterGroup* group, const std::string& name, double value);

// An agreement: what `rank` does with its prepared step, by the reports of all ranks of a run, in rank order, all of
// the same gathering. Before any of them attaches. `attempt` is 0 where there is nothing to do; else the answer, with
// the optimizer's name, is for Client::ResolveStep. DATA_LOSS: the ranks cannot go on together; the sentence names the
// rank.
absl::StatusOr<v1::ResolveStepRequest> Agree(std::span<const v1::RunReport> reports, uint32_t rank);

// Parameters that stream to a GPU, by Parameter.unit, through as many slots (superoffload_gpu_read_unit).
struct StreamedUnits {
  std::set<uint32_t> units;
  uint32_t slots = 0;
};

class AttachmentStream;
class Client;
class Session;

// One trainer's live connection to its optimizer. Its end, by destruction, leaves the optimizer at its last step. Used
// by one thread at a time; spans are valid as long as it lives.
//
// When the daemon dies inside a call and its successor recovers the optimizer, the call attaches anew and what the open
// step had submitted is submitted again, so that the trainer goes on as if nothing had happened. It waits for the
// successor as $SUPEROFFLOAD_RECONNECT_SECONDS and $SUPEROFFLOAD_SOCKET_SECONDS say. DATA_LOSS: there is one, and it
// does not know the optimizer. ABORTED: gradients were lost on their way from a GPU; compute those of the step again.
class Attachment {
 public:
  ~Attachment();
  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;

  // As of the first attach: parameters, layout, groups, step.
  const v1::Optimizer& optimizer() const { return optimizer_; }

  // Elements of parameter `index` in the order of creation, row-major; T has the size of its dtype. Final after
  // WaitStep.
  template <typename T>
  std::span<T> Parameter(size_t index) const {
    return Span<T>(parameters_ + Place(index).parameters_offset(), index);
  }

  // Its gradient in the slot that the open step, or else the next one, fills; another one after each WaitStep. What it
  // holds before the trainer writes it is not specified.
  template <typename T>
  std::span<T> Gradient(size_t index) const {
    return Span<T>(gradients_ + Place(index).gradient_offsets(slot_), index);
  }

  // For the steps that follow, or, inside a step, revised for it.
  absl::Status SetGroup(uint32_t group, const v1::ParameterGroup& hyperparameters);  // those named; the others stay

  // `gradient_scale` is what EndStep is expected to get: 1 without loss scaling, else its inverse.
  absl::Status BeginStep(double gradient_scale = 1);

  // The gradient of a parameter is complete; submits every bucket that is complete with it. FAILED_PRECONDITION: it was
  // before in this step.
  absl::Status GradientReady(size_t parameter);

  // In place of GradientReady: the parameter has no gradient in this step, so its weights, state and step count stay.
  absl::Status ParameterAbsent(size_t parameter);

  // In place of GradientReady: gradients that are elsewhere, in this process or on its GPU (superoffload_hand_over).
  // `gradients` says the rest.
  absl::Status HandOver(std::span<const superoffload_piece> pieces, superoffload_gradients gradients = {});

  // Global norm of the gradients, all of which are ready, without ending the step.
  absl::StatusOr<double> WaitNorm(double gradient_scale = 1);

  // Ends the step; `max_grad_norm` 0 means no clipping.
  absl::Status EndStep(double gradient_scale = 1, double max_grad_norm = 0);

  // A rank of a run of several, in place of EndStep: the step is prepared, with this rank's sum of squares, when
  // WaitPrepared returns. Gather the sums of all ranks in the process group of now, add them in rank order, and end the
  // step with the total. When the gathering fails: destroy the attachment, and begin anew with an agreement (Agree).
  absl::Status PrepareStep(double gradient_scale = 1, double max_grad_norm = 0);
  absl::StatusOr<double> WaitPrepared(absl::Duration timeout = absl::InfiniteDuration());
  absl::Status EndPreparedStep(double total_sum_of_squares, double gradient_scale = 1, double max_grad_norm = 0);

  // For a model on a GPU: gives the attachment GPU memory. Everything further is superoffload_gpu.h with handle(),
  // which is another one after a daemon's death, and superoffload.h with trainer(). Errors as superoffload_gpu_attach.
  absl::StatusOr<superoffload_gpu_report> AttachGpu(int ordinal, superoffload_mover mover = SUPEROFFLOAD_MOVER_AUTO);
  // Of the present handle().
  const superoffload_gpu_report& gpu_report() const { return gpu_report_; }
  // Of parameter `index`, from gpu_report().parameters: in bytes.
  uint64_t GpuOffset(size_t index) const { return gpu_offsets_[index]; }
  superoffload_attachment* handle() const { return handles_.back(); }

  // For superoffload.h.
  int64_t trainer() const { return trainer_; }

  // Drops the open step.
  absl::Status AbandonStep();

  // Waits until the parameters of the step ended last are final. DEADLINE_EXCEEDED: not yet. Of a step that a daemon
  // had committed before it died nobody knows the norm: it is NaN.
  absl::StatusOr<superoffload_verdict> WaitStep(absl::Duration timeout = absl::InfiniteDuration());

  // Waits until Parameter<T>(index) of the step ended last is final.
  absl::Status WaitParameter(size_t index);

  // Waits for the verdict on it; on a GPU parameters may still be on their way.
  absl::StatusOr<superoffload_verdict> WaitVerdict(absl::Duration timeout = absl::InfiniteDuration());

  // The masters become the parameters as they stand in Parameter<T>(); moments stay.
  absl::Status PushParameters();

  // Parameter<T>() becomes the masters.
  absl::Status PullParameters();

 private:
  friend class Client;
  struct GpuWish {
    int ordinal;
    superoffload_mover mover;
  };

  Attachment(Client* client, v1::Optimizer optimizer);
  absl::Status Begin(std::unique_ptr<AttachmentStream> stream, const v1::AttachOptimizerResponse& response,
                     const StreamedUnits& streamed);
  absl::Status LayOut(const StreamedUnits& streamed, std::vector<superoffload_bucket>* buckets);
  absl::Status Attach(std::unique_ptr<AttachmentStream> stream, const v1::AttachOptimizerResponse& response,
                      uint32_t* resumed);
  absl::Status GiveGpu(const v1::Optimizer& optimizer, uint32_t next_slot, superoffload_attachment* previous);
  absl::Status Use(uint32_t next_slot, uint64_t committed_steps, uint32_t* resumed);

  // `status` is what a call has ended with. OK when the daemon is gone and its successor was attached to; *committed:
  // the open step was committed before.
  absl::Status Recover(const absl::Status& status, v1::Sync sync, bool* committed);
  // `call` returns a status code of superoffload.h, and what it is for is noted.
  template <typename Call>
  absl::Status Submit(Call call);
  // A control call, between two steps.
  template <typename Call>
  absl::Status BetweenSteps(Call call);
  absl::Status End(uint32_t kind, double gradient_scale, double max_grad_norm, double total_sum_of_squares = 0);
  absl::StatusOr<superoffload_answer> Wait(superoffload_await_kind awaited, absl::Duration timeout, bool* committed);
  absl::StatusOr<superoffload_verdict> WaitOver(superoffload_await_kind awaited, absl::Duration timeout);

  const v1::Placement& Place(size_t index) const;
  absl::Status CheckParameter(size_t index) const;
  template <typename T>
  std::span<T> Span(std::byte* data, size_t index) const {
    return {reinterpret_cast<T*>(data), elements_[index]};
  }

  Client& client_;
  v1::Optimizer optimizer_;
  std::unique_ptr<AttachmentStream> stream_;
  std::vector<superoffload_attachment*> handles_;  // the last one is in use; spans are of the first, or a GPU has it
  int64_t trainer_ = 0;
  std::optional<GpuWish> gpu_;
  superoffload_gpu_report gpu_report_{};
  uint32_t stream_slots_ = 0;
  std::vector<uint64_t> gpu_offsets_;  // per parameter
  std::byte* parameters_ = nullptr;
  std::byte* gradients_ = nullptr;
  uint32_t slot_ = 0;
  std::vector<size_t> elements_;  // per parameter
};

// How an operator on another machine proves who they are: PEM files, as in remote_operators of config.proto.
struct TlsFiles {
  std::string authority;  // certificates of whoever signed the daemon's
  std::string certificate;
  std::string key;
};

// Calls of one daemon, and of its successor once an attachment has come back from its death. Thread-safe. Must outlive
// its attachments.
class Client {
 public:
  // See ResolveEndpoint. Waits $SUPEROFFLOAD_CONNECT_SECONDS (30). UNAVAILABLE: nobody listens there.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& endpoint = "");

  // Over TCP with mutual TLS, "host:port"; everything but creating and attaching. NOT_FOUND: a file cannot be read.
  static absl::StatusOr<std::unique_ptr<Client>> ConnectRemote(const std::string& endpoint, const TlsFiles& tls);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  absl::StatusOr<v1::ServerInfo> GetServerInfo();
  absl::StatusOr<v1::Topology> GetTopology();
  absl::StatusOr<v1::Optimizer> CreateOptimizer(const v1::CreateOptimizerRequest& request);
  absl::StatusOr<v1::Optimizer> GetOptimizer(const std::string& name,
                                             v1::OptimizerView view = v1::OPTIMIZER_VIEW_BASIC);
  absl::StatusOr<std::vector<v1::Optimizer>> ListOptimizers();
  absl::Status DeleteOptimizer(const std::string& name);
  absl::StatusOr<v1::Optimizer> SettleOptimizer(const std::string& name);
  absl::StatusOr<v1::Optimizer> UpdatePolicies(const std::string& name, const v1::Policies& policies);
  absl::StatusOr<std::unique_ptr<Attachment>> Attach(const v1::AttachOptimizerRequest& request,
                                                     const StreamedUnits& streamed = {});

  // Writes a checkpoint to `directory` and returns its last progress; `on_progress` is called now and then, and cancels
  // it by returning false (CANCELLED). `run_step`: of a rank of a run, see CheckpointOptimizerRequest.
  absl::StatusOr<v1::CheckpointProgress> CheckpointOptimizer(
      const std::string& name, const std::string& directory,
      const std::function<bool(const v1::CheckpointProgress&)>& on_progress,
      std::optional<uint64_t> run_step = std::nullopt);

  // Writes what is whole of a damaged optimizer; the answer's `doubts` say what is not guaranteed.
  absl::StatusOr<v1::ExportOptimizerResponse> ExportOptimizer(const std::string& name, const std::string& directory);
  absl::StatusOr<v1::Optimizer> RestoreOptimizer(const std::string& name, const std::vector<std::string>& directories);

  // Of a rank of a run, for an agreement, and what it has decided. An operator may resolve a step whose run is gone.
  absl::StatusOr<v1::RunReport> ReportRun(const std::string& name);
  absl::StatusOr<v1::Optimizer> ResolveStep(const v1::ResolveStepRequest& request);

  // Calls `on_report` after each step of the optimizer, or of all with an empty name, until it returns false (OK) or
  // the daemon ends the stream.
  absl::Status WatchSteps(const std::string& name, const std::function<bool(const v1::StepReport&)>& on_report);

  const std::string& endpoint() const { return endpoint_; }

 private:
  friend class Attachment;
  Client(std::string endpoint, std::shared_ptr<Session> session);
  std::shared_ptr<Session> session() const;
  absl::StatusOr<std::shared_ptr<Session>> WaitSuccessor(const Session* dead);

  const std::string endpoint_;
  mutable std::mutex mutex_;
  std::shared_ptr<Session> session_;  // protected by it
};

}  // namespace superoffload

#endif  // SUPEROFFLOAD_CLIENT_HPP_
