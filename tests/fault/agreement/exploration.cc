#include "tests/fault/agreement/exploration.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "client/src/agreement.h"

namespace superoffload::faults {
namespace {

constexpr size_t kMostEvents = 300;  // each death costs a few dozen
constexpr uint8_t kManyBatches = 4;

double SumOf(double value) { return 8 * value * value; }  // as the engine adds eight equal squares: exactly

superoffload_run_terms ToC(const engine::Record::RunTerms& terms) {
  return {terms.sum_of_squares, terms.gradient_scale, terms.max_grad_norm};
}

superoffload_run_report ToC(const engine::RunReport& report) {
  superoffload_run_report c{};
  c.lineage = report.lineage;
  c.committed_steps = report.committed_steps;
  c.last = ToC(report.last);
  if (report.prepared) {
    c.prepared_step = report.prepared->step;
    c.prepared_attempt = report.prepared->attempt;
    c.prepared = ToC(report.prepared->terms);
  }
  return c;
}

class KeyWriter {
 public:
  template <typename T>
  void Add(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    key_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void Add(const engine::RunTotal& total) {
    Add(total.attempt);
    Add(total.sum_of_squares);
  }
  void Add(const superoffload_run_report& report) {
    for (const uint64_t word :
         {report.lineage, report.committed_steps, report.prepared_step, report.prepared_attempt}) {
      Add(word);
    }
    Add(report.last.sum_of_squares);
  }
  template <typename T>
  void Add(const std::optional<T>& value) {
    Add(value.has_value());
    if (value) Add(*value);
  }
  std::string Take() { return std::move(key_); }

 private:
  std::string key_;
};

}  // namespace

std::string Exploration::Key(const State& state) {
  KeyWriter key;
  for (const Rank& rank : state.ranks) {
    for (const bool flag : {rank.daemon, rank.attached, rank.stale, rank.submitted, rank.filled}) key.Add(flag);
    key.Add(rank.phase);
    key.Add(rank.round);
    key.Add(rank.batches);
    key.Add(rank.node);
    for (const End* end : {&rank.end, &rank.late}) {
      key.Add(end->there);
      if (end->there) key.Add(end->total);
    }
    key.Add(rank.prepared);
    key.Add(rank.report);
  }
  for (const auto& round : state.rounds) {
    for (const Contribution& contribution : round) {
      key.Add(contribution.there);
      key.Add(contribution.sum);
      key.Add(contribution.step);
    }
  }
  for (const Committed& committed : state.committed) {
    key.Add(committed.there);
    key.Add(committed.total);
    for (const double gradient : committed.gradient) key.Add(gradient);
  }
  key.Add(state.deaths);
  key.Add(state.disturbed);
  return key.Take();
}

double Exploration::Value(uint32_t rank, uint8_t batch) const {
  if (options_.infinite && rank == 1 && batch == 0) return std::numeric_limits<double>::infinity();
  return 1 + 0.5 * rank + 0.25 * batch;
}

std::string Exploration::Run() {
  State first;
  first.deaths = options_.deaths;
  for (uint32_t r = 0; r < kRanks; ++r) {
    const bool other = options_.other_lineage && r == 1;
    const std::vector<RankMachines::PlainStep> trained =
        options_.other_lineage ? std::vector<RankMachines::PlainStep>{{other ? 7.0 : 3.0, 1.0}}
                               : std::vector<RankMachines::PlainStep>{};
    first.ranks[r].node = machines_.Recover(machines_.Image(trained, other ? 2 : 1), 0).node;
  }
  Explore(first);
  return violation_;
}

void Exploration::Violated(const std::string& what) {
  if (!violation_.empty()) return;
  violation_ = what + " after:";
  for (const std::string& event : path_) violation_ += "\n  " + event;
}

void Exploration::Explore(const State& state) {
  if (path_.size() > kMostEvents) return Violated("there is no end");
  if (options_.shallow != 0 && path_.size() > options_.shallow) return;
  for (const Rank& rank : state.ranks) {
    if (options_.planted && rank.batches > kManyBatches) return;  // a broken rule may make ranks start anew for ever
  }
  if (!violation_.empty() || !seen_.insert(Key(state)).second) return;
  moved_ = false;
  bool moved = false;
  for (uint32_t r = 0; r < kRanks; ++r) {
    for (const auto events : {&Exploration::DaemonEvents, &Exploration::TrainerEvents, &Exploration::Deaths}) {
      moved_ = false;
      (this->*events)(state, r);
      moved |= moved_;
    }
  }
  moved_ = false;
  Restart(state);
  moved |= moved_;
  CheckEnd(state);
  bool done = true;
  for (const Rank& rank : state.ranks) done &= rank.phase == Phase::kDone;
  if (!moved && !done) Violated("nobody can go on");
}

void Exploration::Branch(const State& from, const std::string& event, const std::function<bool(State&)>& act) {
  if (!violation_.empty()) return;
  State state = from;
  path_.push_back(event);
  if (act(state)) {
    Explore(state);
    moved_ = true;  // which the successors may have cleared
  }
  path_.pop_back();
}

void Exploration::BranchCall(const State& from, uint32_t rank, const std::string& event, const MachineCall& call,
                             const Then& then) {
  const uint32_t node = from.ranks[rank].node;
  const uint32_t deaths = from.deaths > 0 ? machines_.Call(node, call, 0).stores : 0;
  for (uint32_t death = 0; death <= deaths; ++death) {
    const std::string name = death == 0 ? event : event + ", and the daemon dies at store " + std::to_string(death);
    Branch(from, "rank " + std::to_string(rank) + ": " + name, [&](State& state) {
      const MachineOutcome outcome = machines_.Call(node, call, death);
      return TakeOutcome(state, rank, &call, outcome) && then(state, outcome);
    });
  }
}

// What the outcome of a call does to the daemon. Whether the rules hold.
bool Exploration::TakeOutcome(State& state, uint32_t rank, const MachineCall* call, const MachineOutcome& outcome) {
  Rank& own = state.ranks[rank];
  const uint64_t before = call == nullptr ? outcome.committed : CommittedOf(own);
  own.node = outcome.node;
  if (outcome.died) {
    own.daemon = own.attached = own.stale = own.submitted = false;
    own.end = own.late = {};
    --state.deaths;
    state.disturbed = true;
  }
  if (outcome.committed > before) NoteCommit(state, rank, outcome.committed, call->value);
  return violation_.empty();
}

uint64_t Exploration::CommittedOf(const Rank& rank) {
  return machines_.Committed(rank.daemon ? machines_.ImageOf(rank.node) : rank.node);
}

void Exploration::NoteCommit(State& state, uint32_t rank, uint64_t step, double total) {
  Committed& committed = state.committed[step - 1];
  const Rank& own = state.ranks[rank];
  const double gradient = machines_.Gradient(own.daemon ? machines_.ImageOf(own.node) : own.node, step);
  if (committed.there && committed.total != total) Violated("ranks commit a step with different totals");
  committed.there = true;
  committed.total = total;
  committed.gradient[rank] = gradient;
  double sum = 0;
  bool known = true;
  for (const double value : committed.gradient) {
    known &= value != 0;
    sum += SumOf(value);
  }
  if (known && sum != total) Violated("a rank commits a gradient that is not in the total");
}

void Exploration::KillTrainer(State& state, uint32_t rank) {
  Rank& own = state.ranks[rank];
  own.phase = Phase::kDead;
  own.stale = own.attached;
  own.submitted = false;
  if (own.end.there) own.late = std::exchange(own.end, {});
  own.prepared.reset();
  state.disturbed = true;
}

void Exploration::DaemonEvents(const State& state, uint32_t rank) {
  const Rank& own = state.ranks[rank];
  const std::string who = "rank " + std::to_string(rank) + ": ";
  if (!own.daemon) {
    const uint32_t deaths = state.deaths > 0 ? machines_.Recover(own.node, 0).stores : 0;
    for (uint32_t death = 0; death <= deaths; ++death) {
      Branch(state, who + "a daemon recovers" + (death > 0 ? " and dies" : ""), [&](State& next) {
        next.ranks[rank].daemon = true;
        return TakeOutcome(next, rank, nullptr, machines_.Recover(own.node, death));
      });
    }
    return;
  }
  if (own.attached && own.stale) {
    BranchCall(state, rank, "the daemon notices that its trainer is gone", {.kind = MachineCall::kDetach},
               [rank](State& next, const MachineOutcome& outcome) {
                 if (!outcome.died) next.ranks[rank].attached = next.ranks[rank].stale = false;
                 return true;
               });
  }
  if (own.late.there) {
    const MachineCall end{
        .kind = MachineCall::kEnd, .attempt = own.late.total.attempt, .value = own.late.total.sum_of_squares};
    BranchCall(state, rank, "a late END_STEP", end, [rank](State& next, const MachineOutcome&) {
      next.ranks[rank].late = {};
      return true;
    });
  }
  if (own.end.there) {
    const MachineCall end{
        .kind = MachineCall::kEnd, .attempt = own.end.total.attempt, .value = own.end.total.sum_of_squares};
    BranchCall(state, rank, "END_STEP", end, [this, rank](State& next, const MachineOutcome& outcome) {
      Rank& own = next.ranks[rank];
      own.end = {};
      if (outcome.died) return true;
      if (!outcome.verdict) {
        KillTrainer(next, rank);
        return true;
      }
      own.phase = outcome.committed == options_.steps ? Phase::kDone : Phase::kNext;
      ++own.round;
      return true;
    });
  }
}

MachineOutcome Exploration::Quietly(State& state, uint32_t rank, MachineCall::Kind kind, double value) {
  const MachineOutcome outcome =
      machines_.Call(state.ranks[rank].node, {.kind = kind, .attempt = 0, .value = value}, 0);
  state.ranks[rank].node = outcome.node;
  return outcome;
}

void Exploration::TrainerEvents(const State& state, uint32_t rank) {
  AgreementEvents(state, rank);
  StepEvents(state, rank);
}

void Exploration::AgreementEvents(const State& state, uint32_t rank) {
  const Rank& own = state.ranks[rank];
  const std::string who = "rank " + std::to_string(rank) + ": ";
  if (own.phase == Phase::kReport && own.daemon && options_.fill_before_agreement && !own.filled) {
    Branch(state, who + "the trainer fills its next slot", [&](State& next) {
      next.ranks[rank].filled = true;
      Quietly(next, rank, MachineCall::kFill, Value(rank, next.ranks[rank].batches++));
      return true;
    });
  }
  if (own.phase == Phase::kReport && own.daemon && (!own.attached || options_.report_attached)) {
    Branch(state, who + "report", [&](State& next) {
      const MachineOutcome outcome = Quietly(next, rank, MachineCall::kReport);
      if (!outcome.report) return false;
      next.ranks[rank].report = ToC(*outcome.report);
      next.ranks[rank].phase = Phase::kReported;
      return true;
    });
  }
  bool all = true;
  for (const Rank& other : state.ranks) all &= other.report.has_value();
  if (own.phase == Phase::kReported && (all || options_.decide_early)) Resolve(state, rank);
  if (own.phase == Phase::kAttach && own.daemon && !own.attached) {
    Branch(state, who + "attach", [&](State& next) {
      Quietly(next, rank, MachineCall::kAttach);
      next.ranks[rank].attached = true;
      next.ranks[rank].phase = CommittedOf(next.ranks[rank]) == options_.steps ? Phase::kDone : Phase::kNext;
      return true;
    });
  }
}

void Exploration::Resolve(const State& state, uint32_t rank) {
  std::vector<superoffload_run_report> reports;
  for (const Rank& other : state.ranks) reports.push_back(other.report.value_or(*state.ranks[rank].report));
  superoffload_run_decision decision;
  const client::Status agreed = client::Agree(reports, rank, &decision);
  if (!agreed.ok()) {
    if (!options_.other_lineage) Violated("the ranks cannot agree: " + agreed.message);
    Branch(state, "rank " + std::to_string(rank) + ": all restore", [&](State& next) {
      next.ranks[rank].phase = Phase::kDone;
      return true;
    });
    return;
  }
  if (options_.other_lineage) return Violated("ranks of two lineages agree");
  if (decision.action == 0) {
    Branch(state, "rank " + std::to_string(rank) + ": nothing to resolve", [&](State& next) {
      next.ranks[rank].phase = Phase::kAttach;
      return true;
    });
    return;
  }
  if (!state.ranks[rank].daemon) return;
  const MachineCall call{.kind = decision.action == 1 ? MachineCall::kCommit : MachineCall::kDrop,
                         .attempt = decision.attempt,
                         .value = decision.action == 1 ? decision.commit.sum_of_squares : 0};
  BranchCall(state, rank, decision.action == 1 ? "commits what is prepared" : "abandons what is prepared", call,
             [this, rank](State& next, const MachineOutcome& outcome) {
               if (outcome.died) return true;
               if (outcome.accepted) {
                 next.ranks[rank].phase = Phase::kAttach;
               } else {
                 KillTrainer(next, rank);
               }
               return true;
             });
}

void Exploration::StepEvents(const State& state, uint32_t rank) {
  const Rank& own = state.ranks[rank];
  const std::string who = "rank " + std::to_string(rank) + ": ";
  if (own.phase == Phase::kNext && own.daemon && own.attached && !own.stale) {
    Branch(state, who + "fills and submits", [&](State& next) {
      Rank& mine = next.ranks[rank];
      Quietly(next, rank, MachineCall::kFill, Value(rank, mine.batches++));
      mine.submitted = true;
      mine.prepared.reset();
      mine.phase = Phase::kStepping;
      return true;
    });
  }
  if (own.submitted && own.daemon) {
    const MachineCall calls[] = {
        {.kind = MachineCall::kBegin}, {.kind = MachineCall::kReady}, {.kind = MachineCall::kPrepare}};
    State before = state;
    for (const MachineCall& call : calls) {
      const bool last = call.kind == MachineCall::kPrepare;
      const auto take = [this, rank](State& next, const MachineOutcome& outcome) {
        Rank& mine = next.ranks[rank];
        if (outcome.prepared) mine.prepared = outcome.prepared;
        mine.submitted = false;
        if (!outcome.died && !outcome.prepared) KillTrainer(next, rank);
        return true;
      };
      const uint32_t stores = state.deaths > 0 ? machines_.Call(before.ranks[rank].node, call, 0).stores : 0;
      if (last) {
        BranchCall(before, rank, "the step is submitted", call, take);
        break;
      }
      for (uint32_t death = 1; death <= stores; ++death) {
        Branch(before, who + "the daemon dies while the step is submitted", [&](State& next) {
          const MachineOutcome outcome = machines_.Call(before.ranks[rank].node, call, death);
          return TakeOutcome(next, rank, &call, outcome) && take(next, outcome);
        });
      }
      if (!machines_.Call(before.ranks[rank].node, call, 0).accepted) {
        Branch(before, who + "the step is refused", [&](State& next) {
          KillTrainer(next, rank);
          return true;
        });
        break;
      }
      Quietly(before, rank, call.kind);
      if (call.kind == MachineCall::kReady && state.deaths > 0) {
        Branch(before, who + "the trainer dies before PREPARE", [&](State& next) {
          --next.deaths;
          KillTrainer(next, rank);
          return true;
        });
      }
    }
  }
  if (own.phase == Phase::kStepping && own.prepared) {
    Branch(state, who + "contributes", [&](State& next) {
      if (next.rounds.size() <= own.round) next.rounds.resize(own.round + 1);
      next.rounds[own.round][rank] = {true, own.prepared->sum_of_squares, CommittedOf(own) + 1};
      next.ranks[rank].phase = Phase::kGathering;
      return true;
    });
  }
  if (own.phase == Phase::kGathering) {
    bool all = true, same = true;
    double total = 0;
    for (const Contribution& contribution : state.rounds[own.round]) {
      all &= contribution.there;
      same &= contribution.step == state.rounds[own.round][0].step;
      total += contribution.sum;
    }
    if (all) {
      Branch(state, who + "has gathered", [&](State& next) {
        Rank& mine = next.ranks[rank];
        if (!same) {
          KillTrainer(next, rank);
          return true;
        }
        if (mine.daemon && mine.attached && !mine.stale) mine.end = {true, {total, mine.prepared->attempt}};
        mine.phase = Phase::kEnding;
        return true;
      });
    }
    if (own.daemon && own.attached && !own.stale && state.deaths > 0) {
      BranchCall(state, rank, "is impatient and abandons", {.kind = MachineCall::kAbandon},
                 [this, rank](State& next, const MachineOutcome& outcome) {
                   if (outcome.died) return true;
                   --next.deaths;
                   if (!outcome.accepted) {
                     KillTrainer(next, rank);
                     return true;
                   }
                   next.ranks[rank].phase = Phase::kNext;
                   ++next.ranks[rank].round;
                   return true;
                 });
    }
  }
}

void Exploration::Deaths(const State& state, uint32_t rank) {
  if (state.deaths == 0) return;
  const Rank& own = state.ranks[rank];
  const std::string who = "rank " + std::to_string(rank) + ": ";
  if (own.phase != Phase::kDead) {
    Branch(state, who + "the trainer dies", [&](State& next) {
      --next.deaths;
      KillTrainer(next, rank);
      return true;
    });
  }
  if (own.daemon) {
    Branch(state, who + "the daemon dies", [&](State& next) {
      Rank& mine = next.ranks[rank];
      mine.node = machines_.ImageOf(own.node);
      mine.daemon = mine.attached = mine.stale = mine.submitted = false;
      mine.end = mine.late = {};
      --next.deaths;
      next.disturbed = true;
      return true;
    });
  }
}

void Exploration::Restart(const State& state) {
  if (!state.disturbed) return;
  Branch(state, "all trainers start anew", [&](State& next) {
    for (uint32_t r = 0; r < kRanks; ++r) {
      KillTrainer(next, r);
      Rank& own = next.ranks[r];
      own.phase = Phase::kReport;
      own.report.reset();
      own.round = 0;
      own.filled = false;
    }
    if (!options_.mix_generations) next.rounds.clear();
    next.disturbed = false;
    return true;
  });
}

// When all are done, every rank's state is what the totals and its gradients make of it.
void Exploration::CheckEnd(const State& state) {
  if (options_.other_lineage) return;
  for (uint32_t r = 0; r < kRanks; ++r) {
    const Rank& own = state.ranks[r];
    if (own.phase != Phase::kDone) return;
  }
  for (uint32_t r = 0; r < kRanks; ++r) {
    const Rank& own = state.ranks[r];
    std::vector<RankMachines::PlainStep> steps;
    for (uint64_t t = 1; t <= options_.steps; ++t) {
      const Committed& committed = state.committed[t - 1];
      steps.push_back({committed.gradient[r], std::min(1.0, kMaxGradNorm / (std::sqrt(committed.total) + 1e-6))});
    }
    const uint32_t image = own.daemon ? machines_.ImageOf(own.node) : own.node;
    if (CommittedOf(own) != options_.steps) return Violated("a rank is done too early");
    if (machines_.SettledState(image) != machines_.SettledState(machines_.Image(steps, 1))) {
      return Violated("the state of rank " + std::to_string(r) + " is not that of its gradients and the totals");
    }
  }
}

}  // namespace superoffload::faults
