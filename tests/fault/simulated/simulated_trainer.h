// The trainers of a run, one life after the other. Each keeps to the contract of step_ring.h to the letter, does what
// that allows as early and in as odd an order as it allows, and checks whatever completions say.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_TRAINER_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_TRAINER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/src/core/step_progress.h"
#include "tests/fault/simulated/attempt.h"
#include "tests/fault/simulated/ground.h"
#include "tests/fault/simulated/oracle.h"
#include "tests/fault/simulated/simulated_daemon.h"
#include "tests/fault/simulated/simulated_gpu.h"
#include "tests/fault/simulated/simulated_rings.h"

namespace superoffload::faults {

class SimulatedTrainer {
 public:
  // `on_finished`: as many steps are committed as the scenario wants, and the trainer has detached.
  SimulatedTrainer(Ground* ground, SimulatedDaemon* daemon, std::function<void()> on_finished);

  void Start();
  void DaemonDied();  // the connection is cut; it notices some time later

  const Oracle& oracle() const { return oracle_; }
  bool finished() const { return finished_; }
  std::string Describe() const;

 private:
  // What it submits next. What is in brackets in step_ring.h may be left out.
  enum class Stage : uint8_t { kEarlyGroups, kBegin, kAbsent, kGradients, kMeasure, kGroups, kPrepare, kEnd, kEnded };

  void After(std::function<void()> event);
  void Die();
  void Connect();
  void Disconnect();
  bool ChooseRestore();  // whether a checkpoint was asked for before
  void Attached(const Welcome& welcome);
  void LearnRestore(const Welcome& welcome);
  void NextAttempt();

  void TakeCompletion();
  void TakeParameters(uint32_t bucket, bool speculative);
  void TakeVerdict();
  void CopyFinalParameters();
  void FinishStep();

  void Wake();
  bool Act();  // false: there is nothing to do before a completion
  bool WriteSomeGradient();
  bool SubmitSomeGradient();
  bool SubmitGroups(const std::vector<engine::Scalars>& groups);
  bool SubmitAbsent();
  void SubmitEnd();
  void Submit(superoffload_submission opcode, uint32_t index, superoffload_ring_entry entry = {});
  // With its first values.
  void Submit(superoffload_submission opcode, double f64_0, double f64_1 = 0);
  void Push(const std::shared_ptr<SimulatedRings>& rings, const superoffload_ring_entry& entry);

  // In a run of several ranks.
  void Contribute();
  void ForgetContribution();
  std::optional<double> CommittedElsewhere(uint64_t attempt);
  void CheckNothingIsLost();

  // With a GPU.
  bool GpuHasEnded();  // that of the attachment before, if there was one
  void OpenGpu(const Welcome& welcome);
  bool HandOverSomeGradient();
  void CheckSum(const superoffload_ring_entry& entry);
  bool ReadSomeBucket();
  bool LookAtSomeBucket();
  bool MayRead(uint32_t bucket) const;
  void Read(uint32_t bucket, std::function<void(const std::byte* parameters)> read);
  void HasRead(uint32_t bucket);
  bool ChangeWhatStays();
  void SetResident(uint32_t count);

  Ground& ground_;
  SimulatedDaemon& daemon_;
  const std::function<void()> on_finished_;
  Oracle oracle_;
  uint64_t life_ = 1;
  uint64_t epoch_ = 0;
  bool filled_ = false;  // the first push was whole
  bool finished_ = false;

  // What the next process would do, too.
  Attempt attempt_;
  bool in_question_ = false;  // the attempt was ended, and its verdict has not come
  struct Contribution {
    uint64_t attempt = 0;
    double total = 0;               // of all ranks
    std::optional<bool> committed;  // by another rank
  };
  std::optional<Contribution> contribution_;     // to the attempt in question
  std::shared_ptr<const Checkpoint> restoring_;  // asked for; null: none
  uint32_t restores_left_;
  std::optional<std::vector<std::byte>> edited_;  // parameters that were to be pushed, in place of those of the step

  // Of this process.
  std::vector<std::byte> model_;  // parameters
  bool has_model_ = false;        // all of the last committed step

  // Of this process, and of the latest attachment; null without one. Those before have ended, or were killed.
  std::shared_ptr<SimulatedGpuMemory> gpu_memory_;
  std::unique_ptr<SimulatedGpu> gpu_;
  std::vector<std::unique_ptr<SimulatedGpu>> retired_gpus_;
  std::optional<uint64_t> left_;    // the daemon's life in which the trainer has left between steps
  uint64_t reading_ = 0;            // counts verdicts: whose parameters are read
  bool may_read_all_ = false;       // the step that the verdict was on is over
  std::vector<bool> asked_, read_;  // by bucket

  // Of this attachment.
  std::shared_ptr<SimulatedRings> rings_;
  bool attached_ = false;
  uint64_t waking_ = 0;                           // the epoch of which an Act is on its way; 0: none
  std::optional<client::StepProgress> progress_;  // of the step that was begun last
  uint64_t step_ = 0;                             // its number
  bool over_ = true;                              // all of it has come
  uint32_t slot_ = 0;                             // that the attempt fills, but where a bucket has a log
  Stage stage_ = Stage::kEarlyGroups;
  size_t absent_done_ = 0;
  bool measure_asked_ = false;
  bool may_change_what_stays_ = false;              // once before each attempt
  bool changing_residents_ = false;                 // the daemon settles what is to become resident
  std::vector<engine::Scalars> sent_groups_;        // each empty: nothing yet
  std::vector<std::vector<bool>> free_;             // by slot and bucket: what the slot held is absorbed
  std::vector<uint32_t> host_slots_;                // the slot that the attempt fills, by bucket
  std::vector<bool> written_, submitted_, copied_;  // of the attempt, by bucket
  std::vector<uint32_t> passes_;                    // of it, that have left, by bucket
  std::vector<bool> speculative_, final_;           // PARAMETERS_READY of the step has come
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_TRAINER_H_
