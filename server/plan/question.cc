#include "server/plan/question.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/engine/layout.h"
#include "server/plan/machine_description.h"
#include "server/plan/model_description.h"
#include "server/rpc/from_proto.h"
#include "server/simulator/model_layout.h"

namespace superoffload::plan {
namespace {

struct Range {
  const char* field;
  double value;
  double least;
  double most;
};

absl::Status CheckMissing(const v1::PlanRequest& request) {
  std::vector<std::string> missing;
  if (!request.has_model() && request.model_name().empty()) missing.push_back("model");
  if (!request.has_machine() && request.machine_name().empty()) missing.push_back("machine");
  if (!request.has_batch()) missing.push_back("batch");
  if (!request.has_sequence()) missing.push_back("sequence");
  if (missing.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      absl::StrJoin(missing, ", "), missing.size() == 1 ? " is" : " are",
      " missing; a plan needs a model, a machine, a batch (sequences per rank and pass) and a sequence (tokens)"));
}

absl::Status CheckRanges(const v1::PlanRequest& request) {
  const Range ranges[] = {{"batch", double(request.batch()), 1, 1 << 20},
                          {"sequence", double(request.sequence()), 1, 1 << 28},
                          {"accumulation", double(request.accumulation()), 0, 1 << 20},
                          {"ranks", double(request.ranks()), 0, 1024},
                          {"device_slots", double(request.device_slots()), 0, 16},
                          {"streamed_weights", request.streamed_weights(), 0, 1},
                          {"offloaded_activations", request.offloaded_activations(), 0, 1},
                          {"stream_slots", double(request.stream_slots()), 0, 64},
                          {"resident_steps", double(request.resident_steps()), 0, engine::kMaxLogSlots - 1},
                          {"gradient_slots", double(request.gradient_slots()), 0, 2},
                          {"clip_rate", request.clip_rate(), 0, 1},
                          {"skip_rate", request.skip_rate(), 0, 1},
                          {"price_per_hour", request.price_per_hour(), 0, 1e9},
                          {"measured_tokens_per_second", request.measured_tokens_per_second(), 0, 1e12},
                          {"allocator_reserve", request.allocator_reserve(), 0, 0.9}};
  for (const Range& range : ranges) {
    if (!(range.value >= range.least && range.value <= range.most)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s is %.12g but must be %.12g to %.12g", range.field, range.value, range.least, range.most));
    }
  }
  if (request.clip_rate() + request.skip_rate() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("clip_rate and skip_rate are ", request.clip_rate(), " and ",
                                                   request.skip_rate(), " but must be at most 1 together"));
  }
  return absl::OkStatus();
}

absl::Status SetPass(const v1::PlanRequest& request, simulator::Pass& pass) {
  pass.batch = request.batch();
  pass.sequence = request.sequence();
  switch (request.checkpointing()) {
    case v1::ACTIVATION_CHECKPOINTING_UNSPECIFIED:
    case v1::ACTIVATION_CHECKPOINTING_FULL:
      pass.checkpointing = simulator::Checkpointing::kFull;
      break;
    case v1::ACTIVATION_CHECKPOINTING_NONE:
      pass.checkpointing = simulator::Checkpointing::kNone;
      break;
    case v1::ACTIVATION_CHECKPOINTING_SELECTIVE:
      pass.checkpointing = simulator::Checkpointing::kSelective;
      break;
    default:
      return absl::InvalidArgumentError("checkpointing has an unknown value; see plan.proto");
  }
  switch (request.attention()) {
    case v1::ATTENTION_IMPLEMENTATION_UNSPECIFIED:
    case v1::ATTENTION_IMPLEMENTATION_FLASH:
      pass.attention = simulator::Attention::kFlash;
      break;
    case v1::ATTENTION_IMPLEMENTATION_EAGER:
      pass.attention = simulator::Attention::kEager;
      break;
    default:
      return absl::InvalidArgumentError("attention has an unknown value; see plan.proto");
  }
  switch (request.loss()) {
    case v1::LOSS_UNSPECIFIED:
    case v1::LOSS_WHOLE:
      pass.loss = simulator::Loss::kWhole;
      break;
    case v1::LOSS_CHUNKED:
      pass.loss = simulator::Loss::kChunked;
      break;
    default:
      return absl::InvalidArgumentError("loss has an unknown value; see plan.proto");
  }
  pass.offloaded_activations = request.offloaded_activations();
  if (pass.offloaded_activations > 0 && pass.checkpointing != simulator::Checkpointing::kFull) {
    return absl::InvalidArgumentError(absl::StrCat("offloaded_activations is ", pass.offloaded_activations,
                                                   ", but only inputs of checkpointed blocks leave; leave "
                                                   "checkpointing out, or offloaded_activations"));
  }
  return absl::OkStatus();
}

absl::Status SetWorkers(uint32_t workers, simulator::Machine& machine) {
  if (workers == 0) return absl::OkStatus();
  if (workers > machine.host.cores) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker_threads is ", workers, " but ", machine.name, " has ", machine.host.cores, " cores"));
  }
  machine.trainer_cores = machine.host.cores - workers;
  return absl::OkStatus();
}

absl::Status SetStreams(const v1::PlanRequest& request, Question& question) {
  question.gpu.streamed_weights = request.streamed_weights();
  if (request.stream_slots() > 0) question.gpu.stream_slots = request.stream_slots();
  if (request.streamed_weights() == 0) return absl::OkStatus();
  const char* const with = request.in_place()               ? "in_place"
                           : request.resident_buckets() > 0 ? "resident_buckets"
                                                            : nullptr;
  if (with != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("streamed_weights is ", request.streamed_weights(),
                                                   ", but weights do not stream with ", with,
                                                   "; leave one of the two out"));
  }
  if (simulator::HasSmallBlocks(question.model.parameters)) {
    return absl::InvalidArgumentError(absl::StrCat("streamed_weights is ", request.streamed_weights(),
                                                   ", but a plan streams no blocks of less than ",
                                                   engine::kTaperBytes >> 20, " MiB; leave it out"));
  }
  question.auto_residents = false;
  return absl::OkStatus();
}

absl::Status SetSums(const v1::PlanRequest& request, Question& question) {
  question.gpu.sums_on_host = request.sums_on_host();
  if (!request.sums_on_host()) return absl::OkStatus();
  const char* const with = request.ranks() > 1 ? "ranks above 1" : request.in_place() ? "in_place" : nullptr;
  if (with == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "sums_on_host is set, but gradients are not added up on the host with ", with, "; leave one of the two out"));
}

absl::Status CheckSequence(const Question& question) {
  const uint64_t positions = question.model.architecture.learned_positions;
  if (positions == 0 || question.pass.sequence <= positions) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("sequence is ", question.pass.sequence, " but ", question.model.name,
                                                 " has learned positions for ", positions, " tokens only"));
}

}  // namespace

void Question::SetResidents(uint32_t count) {
  const bool logs = count > 0 && resident_steps > 1 && !spec.in_place;
  gpu.resident_buckets = count;
  spec.logged_buckets = logs ? count : 0;
  spec.log_slots = logs ? resident_steps + 1 : 0;
}

absl::StatusOr<Question> ToQuestion(const v1::PlanRequest& request) {
  if (absl::Status status = CheckMissing(request); !status.ok()) return status;
  if (absl::Status status = CheckRanges(request); !status.ok()) return status;
  Question question;
  if (absl::Status status = SetPass(request, question.pass); !status.ok()) return status;
  absl::StatusOr<DescribedModel> model = ToModel(request);
  if (!model.ok()) return model.status();
  question.model = std::move(model->model);
  question.spec = std::move(model->spec);
  if (absl::Status status = CheckSequence(question); !status.ok()) return status;
  absl::StatusOr<DescribedMachine> machine = ToMachine(request);
  if (!machine.ok()) return machine.status();
  question.machine = std::move(machine->machine);
  question.known_machine = std::move(machine->known);
  if (question.pass.offloaded_activations > 0 && question.machine.one_memory) {
    return absl::InvalidArgumentError(absl::StrCat("offloaded_activations is ", question.pass.offloaded_activations,
                                                   ", but GPU and host of ", question.machine.name,
                                                   " have one memory; leave it out"));
  }
  if (absl::Status status = SetWorkers(request.worker_threads(), question.machine); !status.ok()) return status;
  v1::Policies policies;
  policies.set_speculation(request.speculation());
  const absl::StatusOr<engine::SpeculationPolicy> speculation = rpc::ToSpeculation(policies);
  if (!speculation.ok()) return speculation.status();
  question.speculation = *speculation;
  question.gpu = {.accumulation = std::max(1u, request.accumulation())};
  if (request.resident_steps() > 0) question.resident_steps = request.resident_steps();
  question.may_save_room = request.gradient_slots() == 0 && !request.in_place();
  question.spec.in_place = request.in_place();
  question.spec.gradient_slots = request.gradient_slots() > 0 ? request.gradient_slots() : request.in_place() ? 1 : 2;
  if (request.resident_buckets() > 0 && question.spec.algorithm->resident_kernel == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "resident_buckets is ", request.resident_buckets(), " but ", std::string(question.spec.algorithm->name),
        " has no kernel for the GPU; leave it 0, or choose another algorithm"));
  }
  question.SetResidents(request.resident_buckets());
  question.auto_residents = !request.has_resident_buckets();
  if (request.device_slots() > 0) question.gpu.device_slots = request.device_slots();
  if (request.has_allocator_reserve()) question.gpu.allocator_reserve = request.allocator_reserve();
  if (absl::Status status = SetStreams(request, question); !status.ok()) return status;
  if (absl::Status status = SetSums(request, question); !status.ok()) return status;
  question.ranks = std::max(1u, request.ranks());
  if (question.ranks > 1) {
    if (absl::Status status = simulator::ValidateNetwork(question.machine); !status.ok()) return status;
  }
  question.clip_rate = request.clip_rate();
  question.skip_rate = request.skip_rate();
  question.measured_tokens_per_second = request.measured_tokens_per_second();
  question.clipping = request.clipping() || request.clip_rate() > 0;
  question.quick = request.quick();
  question.timeline = request.timeline();
  return question;
}

}  // namespace superoffload::plan
