#include "tests/simulation/synthetic_trainer.h"

#include <time.h>

#include <algorithm>

#include "kernels/base/check.h"

namespace superoffload {
namespace {

void Require(const absl::Status& status) { SUPEROFFLOAD_CHECK(status.ok(), std::string(status.message())); }

double Now() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void SleepUntil(double seconds) {
  timespec until;
  until.tv_sec = static_cast<time_t>(seconds);
  until.tv_nsec = static_cast<long>((seconds - static_cast<double>(until.tv_sec)) * 1e9);
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) != 0) {
  }
}

v1::CreateOptimizerRequest Request(const std::string& name, const simulator::Model& model) {
  v1::CreateOptimizerRequest request;
  request.set_name(name);
  request.set_algorithm(std::string(kernels::Algorithms().front()->name));
  request.add_groups();
  for (const engine::ParameterSpec& spec : model.parameters) {
    v1::Parameter* parameter = request.add_parameters();
    parameter->set_name(spec.name);
    for (const uint64_t size : spec.shape) parameter->add_shape(size);
    parameter->set_dtype(v1::DATA_TYPE_BFLOAT16);
  }
  return request;
}

}  // namespace

SyntheticTrainer::SyntheticTrainer(Client* client, const std::string& name, const simulator::Workload& workload)
    : client_(client),
      name_(name),
      workload_(workload),
      parameters_of_unit_(workload.units.size()),
      elements_of_unit_(workload.units.size()) {
  const std::vector<engine::ParameterSpec>& parameters = workload.model.parameters;
  for (size_t i = parameters.size(); i-- > 0;) {
    const uint32_t unit = parameters[i].unit;
    parameters_of_unit_[unit].push_back(i);
    elements_of_unit_[unit] += static_cast<double>(engine::ElementCount(parameters[i]));
  }
  Require(client_->CreateOptimizer(Request(name, workload.model)).status());
  v1::AttachOptimizerRequest request;
  request.set_name(name);
  request.set_sync(v1::SYNC_PUSH);
  absl::StatusOr<std::unique_ptr<Attachment>> attachment = client_->Attach(request);
  Require(attachment.status());
  attachment_ = *std::move(attachment);
  Require(attachment_->PushParameters());
}

SyntheticTrainer::~SyntheticTrainer() {
  attachment_.reset();
  Require(client_->DeleteOptimizer(name_));
}

std::vector<double> SyntheticTrainer::Run(int steps) {
  std::vector<double> seconds;
  now_ = Now();
  for (int i = 0; i <= steps; ++i) {
    const double before = now_;
    Step();
    if (i > 0) seconds.push_back(now_ - before);  // the first has no backward before it
  }
  Require(attachment_->WaitStep().status());
  first_ = true;
  return seconds;
}

void SyntheticTrainer::Step() {
  for (size_t unit = 0; unit < workload_.units.size(); ++unit) {
    if (!first_) {
      if (unit == 0) Require(attachment_->WaitVerdict().status());
      const double waiting = Now();
      for (const size_t parameter : parameters_of_unit_[unit]) Require(attachment_->WaitParameter(parameter));
      // Nothing was waited for: the unit before has ended at now_, however late that was noticed.
      if (unit == 0 || Now() - waiting > 200e-6) now_ = std::max(now_, Now());
    }
    Compute(workload_.units[unit].forward);
  }
  if (!first_) Require(attachment_->WaitStep().status());
  first_ = false;
  Require(attachment_->BeginStep());
  for (size_t unit = workload_.units.size(); unit-- > 0;) {
    for (const size_t parameter : parameters_of_unit_[unit]) {
      const double elements = static_cast<double>(engine::ElementCount(workload_.model.parameters[parameter]));
      Compute(workload_.units[unit].backward * elements / elements_of_unit_[unit]);
      Require(attachment_->GradientReady(parameter));
    }
  }
  Require(attachment_->EndStep());
}

// Of computations that follow each other, each begins when the one before was to end.
void SyntheticTrainer::Compute(double seconds) {
  now_ += seconds;
  if (now_ > Now() + 50e-6) SleepUntil(now_);
}

}  // namespace superoffload
