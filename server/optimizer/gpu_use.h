// How a trainer uses its GPU with an optimizer, as the trainer tells.
#ifndef SUPEROFFLOAD_SERVER_OPTIMIZER_GPU_USE_H_
#define SUPEROFFLOAD_SERVER_OPTIMIZER_GPU_USE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace superoffload::optimizer {

// See GpuUse of optimizer.proto.
struct GpuUse {
  struct CastTiming {
    uint64_t elements = 0;
    double fused_seconds = 0;
    double gpu_fp32_seconds = 0;
  };

  std::string gpu;
  std::string mover;
  std::string sharing;
  bool coherent = false;
  bool staged = false;
  std::map<std::string, double> mover_seconds;
  std::string cast;
  std::vector<CastTiming> cast_timings;
  uint32_t resident_buckets = 0;
  uint64_t gpu_bytes = 0;
  std::string notes;
  uint32_t streamed_units = 0;
  uint32_t stream_slots = 0;
  uint64_t streamed_bytes = 0;
};

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_SERVER_OPTIMIZER_GPU_USE_H_
