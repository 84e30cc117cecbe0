// superoffloadctl bench: becomes adam_bench.
#ifndef SUPEROFFLOAD_CLIENT_CTL_BENCH_H_
#define SUPEROFFLOAD_CLIENT_CTL_BENCH_H_

namespace superoffload::ctl {

// Becomes "adam_bench --tune" with the words after "bench"; returns an exit status when that cannot be.
int RunBench(int argc, char** argv);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_BENCH_H_
