#include "tests/fault/agreement/rank_machine.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "kernels/base/check.h"
#include "tests/support/held_pool.h"
#include "tests/support/scalars.h"

namespace superoffload::faults {
namespace {

struct Died {};

class CountedDeaths final : public engine::Deaths {
 public:
  void MayCome() override {
    if (armed && ++stores == death) throw Died();
  }
  bool armed = false;
  uint32_t stores = 0;
  uint32_t death = 0;
};

class OutcomeSink final : public engine::CompletionSink {
 public:
  explicit OutcomeSink(MachineOutcome* outcome) : outcome_(*outcome) {}
  void SlotFree(uint64_t, uint32_t, uint32_t) override {}
  void ParametersReady(uint64_t, uint32_t, bool) override {}
  void NormMeasured(uint64_t, double, double) override {}
  void Prepared(uint64_t, uint64_t attempt, double sum) override { outcome_.prepared = {sum, attempt}; }
  void VerdictReached(const engine::VerdictReport& report) override { outcome_.verdict = report.verdict; }

 private:
  MachineOutcome& outcome_;
};

class NullObserver final : public engine::StepObserver {
  void OnPass(const engine::PassReport&) override {}
  void OnStep(const engine::StepReport&) override {}
};

engine::OptimizerSpec Spec() {
  engine::OptimizerSpec spec;
  spec.groups = {test::ScalarsWith(*spec.algorithm, {{"lr", 1e-2}})};
  engine::ParameterSpec weight{.name = "w", .shape = {8}};
  weight.dtype = weight.gradient_dtype = kernels::DType::kFloat32;
  spec.parameters = {weight};
  return spec;
}

// One life of a daemon.
struct Life {
  Life(const engine::Layout* layout, const engine::OptimizerSpec& spec, const engine::OptimizerMemory& memory,
       MachineOutcome* outcome)
      : memory(memory),
        sink(outcome),
        machine(layout, spec.groups, memory, engine::SpeculationPolicy::kAlways,
                engine::Platform(&pool, &engine::RealClock(), &deaths), &observer,
                [this](uint32_t pass) { machine.PassDone(pass); }),
        layout(*layout) {
    machine.RequireTotals();
  }

  void Recover() {
    machine.Recover([] {});
    pool.RunAll();
  }

  void Fill(double value) const {
    std::byte* const slot = memory.gradients + layout.buckets[0].gradient_offsets[machine.statistics().next_slot()];
    for (size_t i = 0; i < 8; ++i) test::StoreElement(slot, i, kernels::DType::kFloat32, static_cast<float>(value));
  }

  absl::Status Do(const MachineCall& call, MachineOutcome& outcome) {
    const uint64_t step = machine.statistics().step;
    switch (call.kind) {
      case MachineCall::kAttach:
        machine.Attach(&sink);
        return absl::OkStatus();
      case MachineCall::kFill:
        Fill(call.value);
        return absl::OkStatus();
      case MachineCall::kBegin:
        return machine.BeginStep(step + 1, 1);
      case MachineCall::kReady:
        return machine.GradientReady(step, 0, std::nullopt);
      case MachineCall::kPrepare:
        return machine.PrepareStep(step, 1, kMaxGradNorm);
      case MachineCall::kEnd:
        return machine.EndPreparedStep(step, 1, kMaxGradNorm, {call.value, call.attempt});
      case MachineCall::kAbandon:
        return machine.AbandonStep(step);
      case MachineCall::kDetach:
        machine.Detach();
        return absl::OkStatus();
      case MachineCall::kReport: {
        absl::StatusOr<engine::RunReport> report = machine.Report();
        if (report.ok()) outcome.report = *report;
        return report.status();
      }
      case MachineCall::kCommit:
        return machine.CommitPrepared(call.attempt, {call.value, 1, kMaxGradNorm}, [] {});
      case MachineCall::kDrop:
        return machine.AbandonPrepared(call.attempt);
    }
    return absl::InternalError("no such call");
  }

  const engine::OptimizerMemory memory;
  test::HeldPool pool;
  CountedDeaths deaths;
  NullObserver observer;
  OutcomeSink sink;
  engine::StepMachine machine;
  const engine::Layout& layout;
};

}  // namespace

RankMachines::RankMachines()
    : spec_(Spec()),
      layout_(*engine::PlanLayout(spec_)),
      memory_(layout_),
      record_bytes_(engine::Record::Bytes(layout_) -
                    (engine::kMaxWorkers - 1) * kernels::UndoSlotBytes(*layout_.algorithm)) {}

std::string RankMachines::Save() const {
  std::string image;
  const auto add = [&image](const void* data, size_t bytes) { image.append(static_cast<const char*>(data), bytes); };
  add(memory_.parameters.data(), memory_.parameters.size());
  add(memory_.gradients.data(), memory_.gradients.size());
  add(memory_.state.data(), layout_.state_bytes);
  add(memory_.record_bytes.data(), record_bytes_);
  return image;
}

void RankMachines::Load(uint32_t image) {
  const char* from = images_[image].data();
  const auto take = [&from](void* data, size_t bytes) {
    std::memcpy(data, from, bytes);
    from += bytes;
  };
  take(memory_.parameters.data(), memory_.parameters.size());
  take(memory_.gradients.data(), memory_.gradients.size());
  take(memory_.state.data(), layout_.state_bytes);
  take(memory_.record_bytes.data(), record_bytes_);
}

uint32_t RankMachines::Intern(std::string image) {
  const auto [at, added] = image_ids_.try_emplace(std::move(image), images_.size());
  if (added) images_.push_back(at->first);
  return at->second;
}

uint32_t RankMachines::Intern(Node node) {
  const auto [at, added] = node_ids_.try_emplace({node.began, node.calls}, nodes_.size());
  if (added) nodes_.push_back(std::move(node));
  return at->second;
}

MachineOutcome RankMachines::Run(const Node& from, const MachineCall* call, uint32_t death) {
  Load(from.began);
  MachineOutcome outcome, earlier;
  Node to = from;
  {
    Life life(&layout_, spec_, memory_.view(), &outcome);
    life.deaths.death = death;
    try {
      life.deaths.armed = call == nullptr;
      life.Recover();
      life.deaths.armed = false;
      for (const MachineCall& before : from.calls) {
        SUPEROFFLOAD_CHECK(life.Do(before, earlier).ok(), "a call that was accepted is not, the second time");
        life.pool.RunAll();
      }
      outcome = {};
      outcome.accepted = true;
      if (call != nullptr) {
        life.deaths.armed = true;
        outcome.accepted = life.Do(*call, outcome).ok();
        life.pool.RunAll();
        if (outcome.accepted && call->kind != MachineCall::kReport) to.calls.push_back(*call);  // that changes nothing
      }
    } catch (const Died&) {
      outcome.died = true;
    }
    outcome.stores = life.deaths.stores;
    outcome.committed = engine::Record(memory_.view().record, layout_).committed();
  }
  to.now = Intern(Save());
  outcome.node = outcome.died ? to.now : Intern(std::move(to));
  return outcome;
}

MachineOutcome RankMachines::Recover(uint32_t image, uint32_t death) {
  const auto key = std::make_tuple(image, true, MachineCall{}, death);
  if (const auto found = outcomes_.find(key); found != outcomes_.end()) return found->second;
  return outcomes_[key] = Run(Node{.began = image, .calls = {}, .now = image}, nullptr, death);
}

MachineOutcome RankMachines::Call(uint32_t node, const MachineCall& call, uint32_t death) {
  const auto key = std::make_tuple(node, false, call, death);
  if (const auto found = outcomes_.find(key); found != outcomes_.end()) return found->second;
  const Node from = nodes_[node];
  return outcomes_[key] = Run(from, &call, death);
}

uint32_t RankMachines::Image(const std::vector<PlainStep>& steps, uint64_t lineage) {
  std::fill(memory_.parameters.begin(), memory_.parameters.end(), std::byte{0});
  std::fill(memory_.gradients.begin(), memory_.gradients.end(), std::byte{0});
  std::fill(memory_.state.begin(), memory_.state.end(), std::byte{0});
  std::memset(memory_.record_bytes.data(), 0, record_bytes_);
  MachineOutcome outcome;
  Life life(&layout_, spec_, memory_.view(), &outcome);
  engine::StepMachine alone(&layout_, spec_.groups, memory_.view(), engine::SpeculationPolicy::kNever,
                            engine::Platform(&life.pool, &engine::RealClock(), &life.deaths), &life.observer,
                            [&alone](uint32_t pass) { alone.PassDone(pass); });
  alone.Recover([] {});
  alone.SetLineage(lineage);
  for (const auto& [gradient, coefficient] : steps) {
    std::byte* const slot =
        memory_.gradients.data() + layout_.buckets[0].gradient_offsets[alone.statistics().next_slot()];
    for (size_t i = 0; i < 8; ++i) test::StoreElement(slot, i, kernels::DType::kFloat32, static_cast<float>(gradient));
    const uint64_t step = alone.statistics().step + 1;
    absl::Status status = alone.BeginStep(step, coefficient);
    if (status.ok()) status = alone.GradientReady(step, 0, std::nullopt);
    if (status.ok()) status = alone.EndStep(step, coefficient, 0);
    SUPEROFFLOAD_CHECK(status.ok(), std::string(status.message()));
    life.pool.RunAll();
  }
  return Intern(Save());
}

uint64_t RankMachines::Committed(uint32_t image) {
  Load(image);
  return engine::Record(memory_.view().record, layout_).committed();
}

double RankMachines::Gradient(uint32_t image, uint64_t step) {
  Load(image);
  float value;
  std::memcpy(&value, memory_.gradients.data() + layout_.buckets[0].gradient_offsets[engine::SlotOf(step)],
              sizeof(value));
  return value;
}

std::string RankMachines::SettledState(uint32_t image) {
  Load(image);
  MachineOutcome outcome;
  Life life(&layout_, spec_, memory_.view(), &outcome);
  life.Recover();
  return {reinterpret_cast<const char*>(memory_.state.data()), layout_.state_bytes};
}

}  // namespace superoffload::faults
