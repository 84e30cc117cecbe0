#include "tests/fault/simulated/oracle.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace superoffload::faults {

Oracle::Oracle(Ground* ground, const std::vector<std::byte>& parameters)
    : ground_(*ground), groups_(ground->scenario.spec.groups) {
  test::Memory initial(ground_.layout);
  initial.parameters = parameters;
  for (const engine::BucketLayout& bucket : ground_.layout.buckets) {
    kernels::Push(bucket.elements, {parameters.data() + bucket.parameters_offset, bucket.dtype},
                  Masters(initial, bucket));
  }
  Reset(initial, std::vector<uint64_t>(ground_.layout.placements.size()));
}

kernels::MutableElements Oracle::Masters(test::Memory& memory, const engine::BucketLayout& bucket) const {
  const engine::StateFormat& format = ground_.layout.FormatOf(bucket);
  return {memory.state.data() + format.Byte(0, bucket.state_offset), format.arrays[0].array.dtype};
}

void Oracle::Reset(test::Memory& initial, std::vector<uint64_t> steps) {
  optimizer_.emplace(ground_.layout, initial.view(), groups_);
  optimizer_->set_steps(std::move(steps));
  Keep();
}

void Oracle::Restore(const Checkpoint& checkpoint) {
  CheckCheckpoint(checkpoint);
  test::Memory initial(ground_.layout);
  initial.state = checkpoint.state;
  for (const engine::BucketLayout& bucket : ground_.layout.buckets) {
    const kernels::MutableElements masters = Masters(initial, bucket);
    kernels::Publish(bucket.elements, {masters.data, masters.dtype},
                     {initial.parameters.data() + bucket.parameters_offset, bucket.dtype});
  }
  committed_steps_ = checkpoint.moment.statistics.committed_steps;
  history_.erase(history_.upper_bound(committed_steps_), history_.end());
  Reset(initial, checkpoint.moment.parameter_steps);
}

void Oracle::Push(const std::vector<std::byte>& parameters) {
  const Moment moment = history_.at(committed_steps_).back();
  test::Memory initial(ground_.layout);
  initial.state = moment.state;
  initial.parameters = parameters;
  for (const engine::BucketLayout& bucket : ground_.layout.buckets) {
    kernels::Push(bucket.elements, {parameters.data() + bucket.parameters_offset, bucket.dtype},
                  Masters(initial, bucket));
  }
  Reset(initial, moment.parameter_steps);
}

engine::Verdict Oracle::Resolve(const Attempt& attempt) {
  groups_ = attempt.groups;
  if (attempt.abandon_after) return engine::Verdict::kSkipAbandoned;
  if (attempt.bad_elsewhere) return engine::Verdict::kSkipNonFinite;
  optimizer_->groups() = attempt.groups;
  const engine::Verdict verdict =
      optimizer_->Step(attempt.gradients.data(), 0, attempt.scale, attempt.max_grad_norm, attempt.absent);
  if (!engine::IsSkip(verdict)) {
    ++committed_steps_;
    Keep();
  }
  return verdict;
}

void Oracle::Keep() { history_[committed_steps_].push_back({optimizer_->memory().state, optimizer_->steps()}); }

bool Oracle::HasParameters(const std::vector<std::byte>& parameters) const {
  try {
    CheckParameters(parameters, "");
  } catch (const SimulationFailed&) {
    return false;
  }
  return true;
}

void Oracle::CheckParameters(const std::vector<std::byte>& parameters, const char* when,
                             const std::function<bool(uint32_t)>& checked) const {
  for (uint32_t b = 0; b < ground_.buckets(); ++b) {
    if (checked && !checked(b)) continue;
    const engine::BucketLayout& bucket = ground_.layout.buckets[b];
    if (std::memcmp(parameters.data() + bucket.parameters_offset, this->parameters().data() + bucket.parameters_offset,
                    bucket.parameters_bytes()) != 0) {
      Fail("parameters of bucket ", b, " of ", ground_.buckets(), " differ ", when, " with ", committed_steps_,
           " steps committed");
    }
  }
}

const char* Oracle::Compare(const Moment& moment, const std::vector<std::byte>& state,
                            const std::vector<uint64_t>& parameter_steps) const {
  const char* differing = nullptr;
  test::ForEachArray(ground_.layout, [&](const engine::StateFormat& format, size_t array) {
    const uint64_t at = format.Byte(array, 0), bytes = format.arrays[array].array.Bytes(format.elements);
    if (differing != nullptr || std::memcmp(state.data() + at, moment.state.data() + at, bytes) == 0) return;
    differing = array == 0 ? "masters" : "moments";
  });
  if (differing != nullptr) return differing;
  return parameter_steps == moment.parameter_steps ? nullptr : "the parameters' steps";
}

void Oracle::CheckState(const std::vector<std::byte>& state, const std::vector<uint64_t>& parameter_steps) const {
  const char* const different = Compare(history_.at(committed_steps_).back(), state, parameter_steps);
  if (different != nullptr) Fail("the settled state differs in ", different);
}

void Oracle::CheckCheckpoint(const Checkpoint& checkpoint) const {
  const uint64_t committed_steps = checkpoint.moment.statistics.committed_steps;
  const auto moments = history_.find(committed_steps);
  if (moments == history_.end()) Fail("a checkpoint of step ", committed_steps, ", which was not committed");
  const char* different = nullptr;
  for (const Moment& moment : moments->second) {
    different = Compare(moment, checkpoint.state, checkpoint.moment.parameter_steps);
    if (different == nullptr) return;
  }
  Fail("a checkpoint of step ", committed_steps, " differs in ", different);
}

}  // namespace superoffload::faults
