// A trainer that computes nothing: each unit of its model takes a known time, in which it sleeps, as a host does whose
// GPU computes. Gradients are in the shared memory already, and parameters are used where they are published, so what a
// step takes beyond the known times is the daemon's.
#ifndef SUPEROFFLOAD_TESTS_SIMULATION_SYNTHETIC_TRAINER_H_
#define SUPEROFFLOAD_TESTS_SIMULATION_SYNTHETIC_TRAINER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/layout.h"
#include "server/simulator/workload.h"
#include "superoffload/client.hpp"

namespace superoffload {

// Forward waits for each unit's buckets; backward hands each parameter's gradient over when its share of the unit's
// time has passed, by elements. The simulator's trainer does the same (server/simulator/simulated_training.h).
class SyntheticTrainer {
 public:
  // Creates an optimizer `name` in the daemon, and deletes it in the end. Aborts where the daemon refuses.
  SyntheticTrainer(Client* client, const std::string& name, const simulator::Workload& workload);
  ~SyntheticTrainer();

  // Seconds from the end of a backward pass to the end of the next, for each of `steps`.
  std::vector<double> Run(int steps);

 private:
  void Step();
  void Compute(double seconds);

  Client* const client_;
  const std::string name_;
  const simulator::Workload& workload_;
  std::vector<std::vector<size_t>> parameters_of_unit_;
  std::vector<double> elements_of_unit_;
  std::unique_ptr<Attachment> attachment_;
  bool first_ = true;
  double now_ = 0;  // when the last computation ended, or the trainer began to wait: seconds of the steady clock
};

}  // namespace superoffload

#endif  // SUPEROFFLOAD_TESTS_SIMULATION_SYNTHETIC_TRAINER_H_
