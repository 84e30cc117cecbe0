// What the daemon does with each step's gradients, for the buckets that this process updates on the GPU, too: the same
// constants for the same runs, from what is submitted and from the verdicts.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_RESIDENT_STEPS_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_RESIDENT_STEPS_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "client/src/gpu/gpu_layout.h"
#include "client/src/gpu/gpu_options.h"
#include "client/src/status.h"
#include "kernels/algorithm.h"
#include "superoffload/superoffload_gpu.h"
#include "superoffload/v1/step_ring.h"

namespace superoffload::client {

class ResidentSteps {
 public:
  // A range of a bucket whose parameters have the same constants in a step, or one parameter where state is rounded
  // stochastically; what had no gradient is in none.
  struct Run {
    uint64_t first = 0, elements = 0;  // of the bucket
    kernels::StepConstants constants;
    kernels::Rounding rounding = {};
  };

  // How a bucket's state is stored, and at which bytes of the state memory each array begins.
  struct Format {
    const kernels::Algorithm* algorithm;
    std::vector<uint64_t> offsets;
  };

  // INVALID_ARGUMENT: the options contradict the model, or name an algorithm that this library does not know.
  Status Open(const ModelLayout& model, const superoffload_gpu_options& options);

  const Format& FormatOf(const GpuBucket& bucket) const { return formats_[bucket.format]; }

  // Of every submission, by the submitting thread.
  void OnSubmission(const superoffload_ring_entry& entry);

  // Of a verdict that commits, by the thread that takes completions; RunsOf is of the step that this was.
  // INTERNAL: no step was ended.
  Status OnCommit(double clip_coefficient);
  std::vector<Run> RunsOf(uint32_t bucket) const;

 private:
  // As BEGIN_STEP to END_STEP submit it.
  struct Step {
    std::vector<double> scalars;  // of group 0, then of group 1, ...
    std::vector<bool> absent;     // by parameter
    double gradient_scale = 1;
  };

  // What a bucket has of one parameter, the gap behind it included.
  struct Part {
    uint32_t parameter;
    uint64_t first;  // element of the parameter
    uint64_t elements;
  };

  // Of what a parameter draws.
  struct Draws {
    kernels::PhiloxKey key;
    kernels::BoxElements box;
  };

  Status OpenFormats(const ModelLayout& model, const superoffload_gpu_options& options);
  Status OpenDraws(const ModelLayout& model, const superoffload_gpu_options& options);
  static std::vector<Part> PartsOf(const ModelLayout& model, uint32_t bucket);

  const kernels::Algorithm* algorithm_ = nullptr;  // of format 0
  std::vector<Format> formats_;
  std::vector<Draws> draws_;              // by parameter; none unless state is rounded stochastically
  std::vector<uint32_t> groups_;          // by bucket
  std::vector<std::vector<Part>> parts_;  // by bucket

  Step open_;  // the submitting thread's
  std::mutex ended_mu_;
  Step ended_;                             // as END_STEP was submitted
  Step committed_;                         // the completing thread's, clipped
  std::vector<uint64_t> parameter_steps_;  // likewise, committed_ included
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_RESIDENT_STEPS_H_
