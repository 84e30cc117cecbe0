// torch.optim.AdamW on the benchmark's own arrays, in a Python process that steps when told to (torch_adamw.py).
#ifndef SUPEROFFLOAD_KERNELS_BENCH_TORCH_PROCESS_H_
#define SUPEROFFLOAD_KERNELS_BENCH_TORCH_PROCESS_H_

#include <sys/types.h>

#include <cstdio>
#include <string>

#include "kernels/bench/arrays.h"

namespace superoffload::kernels {

class TorchProcess {
 public:
  // `python` has torch. Exits with its message when it does not start.
  TorchProcess(const std::string& python, const Arrays& arrays, int threads);
  ~TorchProcess();

  // Seconds of one step of "fused" or "foreach".
  double Step(const std::string& implementation);

 private:
  pid_t pid_ = 0;
  std::FILE* requests_ = nullptr;
  std::FILE* replies_ = nullptr;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_BENCH_TORCH_PROCESS_H_
