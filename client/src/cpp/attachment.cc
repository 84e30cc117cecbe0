// The steps of an attachment, and how it comes back from a daemon's death.
#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/src/cpp/calls.h"
#include "client/src/cpp/session.h"
#include "superoffload/client.hpp"

namespace superoffload {
namespace {

using Stub = v1::OptimizerService::Stub;

// A daemon that hangs must not hang its trainer's exit.
constexpr std::chrono::seconds kDetachTimeout{30};

// Null: the group has none of that name.
v1::Scalar* FindScalar(v1::ParameterGroup* group, const std::string& name) {
  auto* const scalars = group->mutable_scalars();
  const auto named = [&](const v1::Scalar& scalar) { return scalar.name() == name; };
  const auto found = std::find_if(scalars->begin(), scalars->end(), named);
  return found == scalars->end() ? nullptr : &*found;
}

// DataType of its gradient: its own unless another one is given.
uint32_t GradientDType(const v1::Parameter& parameter) {
  const bool same = parameter.gradient_dtype() == v1::DATA_TYPE_UNSPECIFIED;
  return static_cast<uint32_t>(same ? parameter.dtype() : parameter.gradient_dtype());
}

// The layout of an attach response as superoffload.h takes it.
std::vector<superoffload_bucket> ToC(const v1::Layout& layout) {
  std::vector<superoffload_bucket> buckets;
  for (const v1::Bucket& bucket : layout.buckets()) {
    buckets.push_back({.elements = bucket.elements(),
                       .parameters_offset = bucket.parameters_offset(),
                       .gpu_offset = bucket.parameters_offset(),
                       .gradient_offsets = {bucket.gradient_offsets(0), bucket.gradient_offsets(1)},
                       .state_offset = bucket.state_offset(),
                       .dtype = static_cast<uint32_t>(bucket.dtype()),
                       .gradient_dtype = static_cast<uint32_t>(bucket.gradient_dtype()),
                       .group = bucket.group(),
                       .log_slots = bucket.log_slots(),
                       .log_offset = bucket.log_offset(),
                       .format = bucket.format(),
                       .unit = 0});
  }
  return buckets;
}

uint32_t ThisProcessesCpus() { return std::max(1u, std::thread::hardware_concurrency()); }

// What calls of a daemon that died meet: nobody, or a successor that does not know their token.
bool IsGone(const absl::Status& status) { return absl::IsUnavailable(status) || absl::IsUnauthenticated(status); }

}  // namespace

void SetScalar(v1::ParameterGroup* group, const std::string& name, double value) {
  v1::Scalar* scalar = FindScalar(group, name);
  if (scalar == nullptr) scalar = group->add_scalars();
  scalar->set_name(name);
  scalar->set_value(value);
}

Attachment::Attachment(Client* client, v1::Optimizer optimizer) : client_(*client), optimizer_(std::move(optimizer)) {
  for (const v1::Parameter& parameter : optimizer_.parameters()) {
    size_t elements = 1;
    for (const uint64_t extent : parameter.shape()) elements *= extent;
    elements_.push_back(elements);
  }
}

// Units that stream share slots, from the buckets' offsets on the GPU to the parameters'.
absl::Status Attachment::LayOut(const StreamedUnits& streamed, std::vector<superoffload_bucket>* buckets) {
  const v1::Layout& layout = optimizer_.layout();
  for (int i = 0; i < optimizer_.parameters_size(); ++i) {
    const uint32_t unit = optimizer_.parameters(i).unit();
    if (!streamed.units.contains(unit)) continue;
    const v1::Placement& place = layout.placements(i);
    for (uint32_t b = 0; b < place.bucket_count(); ++b) (*buckets)[place.first_bucket() + b].unit = unit;
  }
  if (stream_slots_ = streamed.slots; stream_slots_ > 0) {
    std::vector<uint64_t> offsets(buckets->size());
    uint64_t bytes = 0;
    if (int code = superoffload_gpu_lay_out(buckets->data(), static_cast<uint32_t>(buckets->size()), stream_slots_,
                                            offsets.data(), &bytes);
        code != 0) {
      return FromC(code);
    }
    for (size_t b = 0; b < offsets.size(); ++b) (*buckets)[b].gpu_offset = offsets[b];
  }
  for (const v1::Placement& place : layout.placements()) {
    const superoffload_bucket& bucket = (*buckets)[place.first_bucket()];
    gpu_offsets_.push_back(bucket.gpu_offset + place.parameters_offset() - bucket.parameters_offset);
  }
  return absl::OkStatus();
}

absl::Status Attachment::Begin(std::unique_ptr<AttachmentStream> stream, const v1::AttachOptimizerResponse& response,
                               const StreamedUnits& streamed) {
  std::vector<superoffload_bucket> buckets = ToC(optimizer_.layout());
  if (absl::Status status = LayOut(streamed, &buckets); !status.ok()) return status;
  std::vector<superoffload_parameter> parameters;
  for (int i = 0; i < optimizer_.parameters_size(); ++i) {
    const v1::Parameter& parameter = optimizer_.parameters(i);
    const v1::Placement& place = optimizer_.layout().placements(i);
    parameters.push_back({.name = parameter.name().c_str(),
                          .elements = elements_[static_cast<size_t>(i)],
                          .parameters_offset = place.parameters_offset(),
                          .gpu_offset = gpu_offsets_[static_cast<size_t>(i)],
                          .gradient_offsets = {place.gradient_offsets(0), place.gradient_offsets(1)},
                          .state_offset = place.state_offset(),
                          .first_bucket = place.first_bucket(),
                          .bucket_count = place.bucket_count(),
                          .dtype = static_cast<uint32_t>(parameter.dtype()),
                          .gradient_dtype = GradientDType(parameter)});
  }
  const superoffload_trainer_options options{.parameters = parameters.data(),
                                             .buckets = buckets.data(),
                                             .parameter_count = static_cast<uint32_t>(parameters.size()),
                                             .bucket_count = static_cast<uint32_t>(buckets.size()),
                                             .group_count = static_cast<uint32_t>(optimizer_.groups_size()),
                                             .scalar_count = static_cast<uint32_t>(optimizer_.groups(0).scalars_size()),
                                             .threads = ThisProcessesCpus(),
                                             .reserved = 0};
  if (int code = superoffload_open_trainer(&options, &trainer_); code != 0) return FromC(code);
  uint32_t resumed = 0;
  if (absl::Status status = Attach(std::move(stream), response, &resumed); !status.ok()) return status;
  for (const auto& [region, memory] : {std::pair{SUPEROFFLOAD_REGION_PARAMETERS, &parameters_},
                                       std::pair{SUPEROFFLOAD_REGION_GRADIENTS, &gradients_}}) {
    void* data = nullptr;
    size_t bytes = 0;
    if (int code = superoffload_memory(handles_.front(), region, &data, &bytes); code != 0) return FromC(code);
    *memory = static_cast<std::byte*>(data);
  }
  return absl::OkStatus();
}

// Later spans are of the first one's memory, which is the same.
absl::Status Attachment::Attach(std::unique_ptr<AttachmentStream> stream, const v1::AttachOptimizerResponse& response,
                                uint32_t* resumed) {
  superoffload_attachment* handle = nullptr;
  const int code =
      superoffload_attach(stream->session().connection(), response.attachment_epoch(), response.optimizer().step(),
                          static_cast<uint32_t>(optimizer_.layout().buckets_size()), &handle);
  if (code != 0) return FromC(code);
  handles_.push_back(handle);
  stream_ = std::move(stream);
  if (gpu_) {
    superoffload_use_attachment(trainer_, nullptr, 0, 0, 0, nullptr);
    superoffload_attachment* const previous = handles_[handles_.size() - 2];
    const absl::Status given = GiveGpu(response.optimizer(), response.next_slot(), previous);
    if (!given.ok()) return given;
  }
  return Use(response.next_slot(), response.optimizer().committed_steps(), resumed);
}

absl::Status Attachment::Use(uint32_t next_slot, uint64_t committed_steps, uint32_t* resumed) {
  slot_ = next_slot;
  return FromC(
      superoffload_use_attachment(trainer_, handles_.back(), next_slot, committed_steps, /*resumes=*/1, resumed));
}

Attachment::~Attachment() {
  if (trainer_ != 0) superoffload_close_trainer(trainer_);
  if (stream_ != nullptr) {  // else the attach failed; the end of the stream cleans up
    CallContext context(stream_->session().token());
    context.set_deadline(std::chrono::system_clock::now() + kDetachTimeout);
    v1::DetachOptimizerResponse response;
    stream_->session().optimizers().DetachOptimizer(&context, Named<v1::DetachOptimizerRequest>(optimizer_.name()),
                                                    &response);  // fails when the daemon has ended it already
  }
  for (superoffload_attachment* const handle : handles_) superoffload_detach(handle);
}

absl::Status Attachment::Recover(const absl::Status& status, v1::Sync sync, bool* committed) {
  if (!IsGone(status)) return status;
  auto request = Named<v1::AttachOptimizerRequest>(optimizer_.name());
  request.set_sync(sync);
  uint32_t resumed = SUPEROFFLOAD_RESUMED_NOTHING;
  while (true) {
    absl::StatusOr<std::shared_ptr<Session>> session = client_.WaitSuccessor(&stream_->session());
    if (!session.ok()) return session.status();
    if (gpu_) superoffload_gpu_end_landings(handles_.back());  // the daemon may publish where they land
    v1::AttachOptimizerResponse response;
    absl::StatusOr<std::unique_ptr<AttachmentStream>> stream = AttachmentStream::Open(*session, request, &response);
    absl::Status attached = stream.status();
    if (attached.ok() && response.optimizer().id() != optimizer_.id()) {
      attached = absl::NotFoundError("another optimizer has its name now");
    }
    if (attached.ok()) attached = Attach(*std::move(stream), response, &resumed);
    if (attached.ok()) break;
    if (absl::IsNotFound(attached)) {
      return absl::DataLossError(absl::StrCat(
          "the masters and moments of optimizer \"", optimizer_.name(), "\" are lost with the daemon that had them: ",
          attached.message(), "; begin anew from a checkpoint, or from the parameters of this process"));
    }
    if (!IsGone(attached)) return attached;  // else it died again
  }
  if (committed != nullptr) *committed = resumed == SUPEROFFLOAD_RESUMED_COMMITTED;
  if (resumed != SUPEROFFLOAD_RESUMED_LOST) return absl::OkStatus();
  return absl::AbortedError(
      "the daemon died in the middle of a step, with gradients that were on their way; its successor has the "
      "optimizer, "
      "and the parameters are those of the step before: compute the gradients of this step again");
}

template <typename Call>
absl::Status Attachment::Submit(Call call) {
  const absl::Status status = FromC(call());
  return status.ok() ? status : Recover(status, v1::SYNC_PULL, nullptr);
}

template <typename Call>
absl::Status Attachment::BetweenSteps(Call call) {
  while (true) {
    const absl::Status status = call();
    if (status.ok()) return status;
    // Parameters stay as they are in memory: the trainer may have changed them.
    if (absl::Status again = Recover(status, v1::SYNC_PUSH, nullptr); !again.ok()) return again;
  }
}

const v1::Placement& Attachment::Place(size_t index) const {
  return optimizer_.layout().placements(static_cast<int>(index));
}

absl::Status Attachment::CheckParameter(size_t index) const {
  if (index < elements_.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("parameter ", index, " does not exist; the optimizer has ", elements_.size(), " parameters"));
}

absl::Status Attachment::SetGroup(uint32_t group, const v1::ParameterGroup& hyperparameters) {
  if (group >= static_cast<uint32_t>(optimizer_.groups_size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", group, " does not exist; the optimizer has ", optimizer_.groups_size(), " groups"));
  }
  v1::ParameterGroup& known = *optimizer_.mutable_groups(static_cast<int>(group));
  for (const v1::Scalar& given : hyperparameters.scalars()) {
    v1::Scalar* const found = FindScalar(&known, given.name());
    if (found == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(optimizer_.algorithm(), " has no hyper-parameter \"", given.name(), "\""));
    }
    found->set_value(given.value());
  }
  std::vector<double> scalars;
  for (const v1::Scalar& scalar : known.scalars()) scalars.push_back(scalar.value());
  return Submit(
      [&] { return superoffload_set_scalars(trainer_, group, scalars.data(), static_cast<uint32_t>(scalars.size())); });
}

absl::Status Attachment::BeginStep(double gradient_scale) {
  if (gradient_scale == 0) return absl::InvalidArgumentError("gradient scale is 0 but must be finite and not 0");
  superoffload_gradients none{};
  none.gradient_scale = gradient_scale;
  return HandOver({}, none);
}

absl::Status Attachment::GradientReady(size_t parameter) {
  if (absl::Status status = CheckParameter(parameter); !status.ok()) return status;
  const superoffload_piece piece{
      .data = reinterpret_cast<uint64_t>(gradients_ + Place(parameter).gradient_offsets(static_cast<int>(slot_))),
      .first = 0,
      .elements = elements_[parameter],
      .parameter = static_cast<uint32_t>(parameter),
      .dtype = GradientDType(optimizer_.parameters(static_cast<int>(parameter)))};
  return HandOver({&piece, 1});
}

absl::Status Attachment::HandOver(std::span<const superoffload_piece> pieces, superoffload_gradients gradients) {
  gradients.pieces = pieces.data();
  gradients.piece_count = static_cast<uint32_t>(pieces.size());
  return Submit([&] { return superoffload_hand_over(trainer_, &gradients); });
}

absl::Status Attachment::ParameterAbsent(size_t parameter) {
  if (absl::Status status = CheckParameter(parameter); !status.ok()) return status;
  const auto absent = static_cast<uint32_t>(parameter);
  superoffload_gradients none{};
  none.absent = &absent;
  none.absent_count = 1;
  return HandOver({}, none);
}

absl::Status Attachment::End(uint32_t kind, double gradient_scale, double max_grad_norm, double total_sum_of_squares) {
  const superoffload_step_end end{gradient_scale, max_grad_norm, total_sum_of_squares, kind, 0, nullptr};
  return Submit([&] { return superoffload_end(trainer_, &end); });
}

absl::Status Attachment::EndStep(double gradient_scale, double max_grad_norm) {
  return End(SUPEROFFLOAD_END, gradient_scale, max_grad_norm);
}

absl::Status Attachment::AbandonStep() { return End(SUPEROFFLOAD_END_ABANDON, 1, 0); }

// `committed` as of Recover: nothing is left to wait for.
absl::StatusOr<superoffload_answer> Attachment::Wait(superoffload_await_kind kind, absl::Duration timeout,
                                                     bool* committed) {
  const absl::Time deadline = absl::Now() + timeout;
  const superoffload_awaited awaited{static_cast<uint32_t>(kind), 0, 0};
  superoffload_answer answer{};
  while (true) {
    const int code = superoffload_wait(trainer_, &awaited, Milliseconds(deadline - absl::Now()), &answer);
    if (code == 0) return answer;
    const absl::Status status = FromC(code);
    if (absl::Status again = Recover(status, v1::SYNC_PULL, committed); !again.ok()) return again;
    if (*committed) return answer;
  }
}

absl::StatusOr<double> Attachment::WaitNorm(double gradient_scale) {
  const superoffload_step_end measure{gradient_scale, 0, 0, SUPEROFFLOAD_END_MEASURE, 0, nullptr};
  const superoffload_awaited awaited{SUPEROFFLOAD_AWAIT_NORM, 0, 0};
  superoffload_answer answer{};
  while (true) {
    absl::Status status = FromC(superoffload_end(trainer_, &measure));
    if (status.ok()) status = FromC(superoffload_wait(trainer_, &awaited, -1, &answer));
    if (status.ok()) return answer.norm;
    if (absl::Status again = Recover(status, v1::SYNC_PULL, nullptr); !again.ok()) return again;
  }
}

absl::StatusOr<superoffload_verdict> Attachment::WaitOver(superoffload_await_kind awaited, absl::Duration timeout) {
  bool committed = false;
  absl::StatusOr<superoffload_answer> answer = Wait(awaited, timeout, &committed);
  if (!answer.ok()) return answer.status();
  superoffload_verdict& verdict = answer->verdict;
  if (committed) {
    superoffload_open_step_state step;
    if (int code = superoffload_look(trainer_, &step, nullptr); code != 0) return FromC(code);
    verdict = {.kind = SUPEROFFLOAD_VERDICT_COMMIT,
               .speculated_buckets = 0,
               .republished_buckets = 0,
               .next_slot = step.next_slot,
               .consecutive_skips = 0,
               .step = 0,
               .committed_steps = step.committed_steps,
               .global_norm = std::numeric_limits<double>::quiet_NaN(),
               .clip_coefficient = std::numeric_limits<double>::quiet_NaN()};
  }
  slot_ = verdict.next_slot;
  return verdict;
}

absl::StatusOr<superoffload_verdict> Attachment::WaitStep(absl::Duration timeout) {
  return WaitOver(SUPEROFFLOAD_AWAIT_STEP, timeout);
}

absl::StatusOr<superoffload_verdict> Attachment::WaitVerdict(absl::Duration timeout) {
  return WaitOver(SUPEROFFLOAD_AWAIT_VERDICT, timeout);
}

absl::Status Attachment::WaitParameter(size_t index) {
  if (absl::Status status = CheckParameter(index); !status.ok()) return status;
  superoffload_awaited awaited{SUPEROFFLOAD_AWAIT_BUCKET, Place(index).first_bucket(), 0};
  const uint32_t end = awaited.bucket + Place(index).bucket_count();
  while (awaited.bucket < end) {
    const absl::Status status = FromC(superoffload_wait(trainer_, &awaited, -1, nullptr));
    bool committed = false;
    if (status.ok()) {
      ++awaited.bucket;
    } else if (absl::Status again = Recover(status, v1::SYNC_PULL, &committed); !again.ok() || committed) {
      return again;
    }
  }
  return absl::OkStatus();
}

absl::Status Attachment::PushParameters() {
  return BetweenSteps([&] {
    return stream_->session().Ask(&Stub::PushParameters, Named<v1::PushParametersRequest>(optimizer_.name())).status();
  });
}

absl::Status Attachment::PullParameters() {
  return BetweenSteps([&] {
    return stream_->session().Ask(&Stub::PullParameters, Named<v1::PullParametersRequest>(optimizer_.name())).status();
  });
}

}  // namespace superoffload
