// Our own schedule: the real step machine, layout and mover (kernels/gpu/mover.h), driven by a trainer in virtual time.
//
// The trainer is a GPU with four streams, as the client library has them: the model's kernels, packing, copies down and
// copies up. The hook of a bucket's last gradient packs it into a device slot and copies it to the host, where the
// machine gets it with its sum of squares; while every slot is taken the trainer launches nothing more. After the
// verdict the uploads are issued as kernels/gpu/upload_order.h says, and a unit's forward pass waits for its own
// buckets. A block whose parameters stream (kernels/gpu/weight_stream.h) waits for them in each pass, and they are
// published after the verdict. Gradients that are added up on the host come back for each pass but the first, and leave
// again (client/src/gpu/gradient_sums.h). Of activations that wait on the host (Pass), a block's leaves while the block
// computes, and the one before it comes back while the block is in backward.
//
// Of several ranks one is simulated: its shards are hosted, units are gathered and reduced as sharded_units.h says, and
// each step is prepared and agreed on (server/engine/README.md).
//
// Not in it: launching takes no time, packing does not slow down the model's kernels, and resident buckets are updated
// at the speed of the GPU's memory, of which an H100 reaches 0.9 in fp32, 0.7 in bf16 and 0.4 in 8 bits
// (tests/device/RESULTS.md).
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_OURS_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_OURS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/algorithm.h"
#include "kernels/gpu/upload_order.h"
#include "server/engine/speculation.h"
#include "server/simulator/outcome.h"

namespace superoffload::simulator {

class Ours {
 public:
  struct Settings {
    // Its passes move their own bytes. What they compute is taken to cost what the first algorithm's does, which has a
    // root and a division per element, no less than any other; and as much more as rounding takes (CostsOf).
    const kernels::Algorithm* algorithm = kernels::Algorithms().front();
    engine::SpeculationPolicy speculation = engine::SpeculationPolicy::kAdaptive;
    uint64_t bucket_bytes = 0;  // of gradient; 0: the daemon's default
    uint32_t device_slots = 8;  // at least 1
    size_t uploads_in_flight = kernels::UploadOrder::kInFlight;
    uint32_t resident_buckets = 0;  // of those that backward reaches last
    uint32_t log_slots = 0;         // of the log that each of these has; 0: the daemon absorbs them in every step
    uint32_t gradient_slots = 2;    // 1: a gradient is copied down when the one before it was absorbed
    bool in_place = false;          // and parameters are published there
    double streamed_weights = 0;    // the share of the blocks whose parameters stream (StreamedUnits)
    uint32_t stream_slots = 3;
    bool sums_on_host = false;        // gradients of a step's passes are added up there, of one rank
    bool sums_with_gradients = true;  // as trainers on a GPU do; else the daemon's passes compute the norm
  };

  explicit Ours(const Settings& settings) : settings_(settings) {}

  // The model must be one that engine::ValidateSpec accepts. Ten steps show rates of whole tenths; between those the
  // outcome is interpolated.
  Outcome Run(const Machine& machine, const Workload& workload, const RunOptions& options) const;

 private:
  Outcome RunTenths(const Machine& machine, const Workload& workload, const RunOptions& options) const;

  const Settings settings_;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_OURS_H_
