// Measures the kernels against the memory's limits and against peers, on the same arrays, interleaved, in one run.
// README.md beside this file explains the numbers.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/adam/adam.h"
#include "kernels/bench/arrays.h"
#include "kernels/bench/baselines.h"
#include "kernels/bench/machine.h"
#include "kernels/bench/publish.h"
#include "kernels/bench/report.h"
#include "kernels/bench/subnormals.h"
#include "kernels/bench/team.h"
#include "kernels/bench/torch_process.h"
#include "kernels/undo_slot.h"
#include "superoffload/v1/exit_status.h"

ABSL_FLAG(bool, json, false, "print one JSON object per kernel and thread count");
ABSL_FLAG(uint64_t, elements, 64 << 20, "elements of each array; rounded up to whole chunks of 64 Ki");
ABSL_FLAG(std::vector<std::string>, threads, {}, "thread counts, comma-separated; default: all cores");
ABSL_FLAG(std::string, dtype, "bfloat16", "of gradients and published parameters: bfloat16, float16 or float32");
ABSL_FLAG(int, repetitions, 15, "passes of each kernel; medians are reported");
ABSL_FLAG(std::string, torch, "", "a Python with torch: measures torch.optim.AdamW, fused and foreach, too");

ABSL_FLAG(bool, tune, false, "find this machine's best number of workers and prefetch distance, for the configuration");
ABSL_FLAG(bool, subnormals, false, "measure what decaying moments cost, on every instruction set, and nothing else");
ABSL_FLAG(bool, publish, false,
          "measure the publish pass of every algorithm beside reading its arrays, and nothing else");
ABSL_FLAG(std::string, output, "", "with --tune: write the fields of superoffloadd.textproto there");
ABSL_FLAG(
    std::string, machine_output, "",
    "measure this machine's CPU for superoffloadctl plan, and nothing else, and write a MachineDescription there");
ABSL_FLAG(std::string, machine_like, "laptop",
          "with --machine_output: the known machine whose GPU and link the description takes");

namespace superoffload::kernels {
namespace {

std::optional<DType> ParseDType(const std::string& name) {
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float16") return DType::kFloat16;
  if (name == "float32") return DType::kFloat32;
  return std::nullopt;
}

struct Benchmark {
  Kernel kernel;
  std::function<double()> seconds;  // of one pass over the arrays
};

class AdamBench {
 public:
  AdamBench(const Baselines& baselines, size_t elements, DType dtype, int threads, const std::string& python)
      : baselines_(baselines), team_(threads), arrays_(elements, dtype, dtype, team_), width_(DTypeBytes(dtype)) {
    for (int i = 0; i < threads; ++i) undo_.emplace_back(kAdamW8Bit);  // the largest
    if (!python.empty()) torch_ = std::make_unique<TorchProcess>(python, arrays_, threads);
  }

  Report Run(int repetitions) {
    const std::vector<Benchmark> benchmarks = Benchmarks();
    std::vector<Kernel> kernels;
    for (const Benchmark& b : benchmarks) {
      kernels.push_back(b.kernel);
      benchmark::RegisterBenchmark(b.kernel.name.c_str(),
                                   [&b](benchmark::State& state) {
                                     for (auto _ : state) state.SetIterationTime(b.seconds());
                                   })
          ->Iterations(1)
          ->Repetitions(repetitions)
          ->UseManualTime();
    }
    Report report(std::move(kernels), arrays_.elements(), team_.threads());
    benchmark::RunSpecifiedBenchmarks(&report);
    benchmark::ClearRegisteredBenchmarks();
    return report;
  }

  // Of the pass that the daemon runs most, with each of the prefetch distances; median seconds, in their order.
  std::vector<double> TimeDeferred(const std::vector<size_t>& distances, int repetitions) {
    const std::vector<Benchmark> benchmarks = Benchmarks();
    const auto deferred = std::find_if(benchmarks.begin(), benchmarks.end(),
                                       [](const Benchmark& b) { return b.kernel.name == "deferred_undo"; });
    std::vector<std::vector<double>> seconds(distances.size());
    for (int repetition = 0; repetition <= repetitions; ++repetition) {
      for (size_t i = 0; i < distances.size(); ++i) {
        SetPrefetchElements(distances[i]);
        const double now = deferred->seconds();
        if (repetition > 0) seconds[i].push_back(now);  // the first one warms up
      }
    }
    std::vector<double> medians;
    for (std::vector<double>& s : seconds) {
      std::nth_element(s.begin(), s.begin() + s.size() / 2, s.end());
      medians.push_back(s[s.size() / 2]);
    }
    return medians;
  }

  const std::string& pages() const { return arrays_.pages(); }

 private:
  // A kernel over every chunk; `work(first, thread)`.
  template <typename Work>
  Benchmark Pass(const std::string& name, double bytes, Work work) {
    return {{name, bytes}, [this, work] {
              const auto begin = std::chrono::steady_clock::now();
              team_.RunChunks(arrays_.elements() / kChunkElements,
                              [&](size_t chunk, int thread) { work(chunk * kChunkElements, thread); });
              return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
            }};
  }

  std::vector<Benchmark> Benchmarks() {
    const Arrays& a = arrays_;
    const size_t n = kChunkElements;
    const double w = static_cast<double>(width_);
    std::vector<double> scalars = kAdamW.DefaultScalars();
    scalars[0] = 1e-5;
    const StepConstants absorb = kAdamW.make_constants(scalars.data(), 100, 1);
    const StepConstants publish = kAdamW.make_constants(scalars.data(), 101, 1);
    const AlgorithmKernels& kernels = kAdamW.best();
    const PeerStep peer{.beta1 = 0.9f,
                        .beta2 = 0.999f,
                        .eps = 1e-8f,
                        .weight_decay = -1e-7f,
                        .bias_correction2 = 3.2f,
                        .step_size = -1e-5f};
    std::vector<Benchmark> all{
        Pass("update_in_place", 24, [=, &a, this](size_t i, int) { baselines_.update_in_place(n, a.state(i)); }),
        Pass("triad", 16,
             [=, &a, this](size_t i, int) { baselines_.triad(n, a.peer_gradient(i), a.state(i).p, a.state(i).m); }),
        Pass("peer_step", 28,
             [=, &a, this](size_t i, int) { baselines_.peer_step(n, a.state(i), peer, a.peer_gradient(i)); }),
        Pass("peer_cast", 8,
             [=, &a, this](size_t i, int) {
               baselines_.peer_cast(n, a.state(i).p, static_cast<uint16_t*>(a.theta(i).data));
             }),
        Pass("plain", 24 + 2 * w,
             [=, &a, &kernels](size_t i, int) {
               kernels.plain(0, n, a.state(i).view(), absorb, a.pending(i), a.theta(i));
             }),
        Pass("publish_norm", 12 + 2 * w,
             [=, &a, &kernels](size_t i, int) {
               NormLanes norm;
               kernels.publish(0, n, a.state(i).view(), publish, a.gradient(i), a.theta(i), &norm);
               benchmark::DoNotOptimize(norm.Sum());
             }),
        Pass("read_stream", 12 + 2 * w,
             [=, &a, this](size_t i, int) {
               baselines_.read_stream(n, a.state(i), a.gradient(i).data, a.theta(i).data, width_);
             }),
        Pass("norm", w, [=, &a](size_t i, int) { benchmark::DoNotOptimize(SumOfSquares(n, a.gradient(i))); })};
    for (const Algorithm* const algorithm : {&kAdamW, &kAdamWBFloat16, &kAdamWBFloat16Nearest, &kAdamW8Bit,
                                             &kAdamWMasters16, &kAdamWBFloat16Masters16, &kAdamW8BitMasters16}) {
      AddPasses(*algorithm, absorb, publish, all);
    }
    for (const char* implementation : {"fused", "foreach"}) {
      if (torch_ == nullptr) break;
      all.push_back({{std::string("torch_") + implementation, 28},
                     [this, implementation] { return torch_->Step(implementation); }});
    }
    return all;
  }

  // Those of the daemon, by one of the formats of AdamW's state.
  void AddPasses(const Algorithm& algorithm, const StepConstants& absorb, const StepConstants& publish,
                 std::vector<Benchmark>& all) {
    const Arrays& a = arrays_;
    const AlgorithmKernels& kernels = algorithm.best();
    const size_t n = kChunkElements;
    double state = 0;
    for (const StateArray& array : algorithm.arrays) {
      state += static_cast<double>(array.Bytes(n)) / static_cast<double>(n);
    }
    const std::string format(algorithm.name.substr(kAdamW.name.size()));
    const double w = static_cast<double>(width_);
    all.push_back(
        Pass("deferred_undo" + format, 2 * state + 3 * w, [=, &a, &algorithm, &kernels, this](size_t i, int thread) {
          BeginUndo(*undo_[thread], i / kChunkElements + 1);
          NormLanes norm;
          kernels.absorb_and_publish(0, n, a.StateOf(algorithm, i), absorb, a.pending(i), publish, a.gradient(i),
                                     a.theta(i), &norm, undo_[thread].get());
          benchmark::DoNotOptimize(norm.Sum());
          EndUndo(*undo_[thread]);
        }));
    all.push_back(Pass("settle" + format, 2 * state + w, [=, &a, &algorithm, &kernels, this](size_t i, int thread) {
      kernels.absorb(0, n, a.StateOf(algorithm, i), absorb, a.pending(i), undo_[thread].get());
    }));
    all.push_back(
        Pass("take_in" + format, 2 * state + 2 * w, [=, &a, &algorithm, &kernels, this](size_t i, int thread) {
          const StateView of = a.StateOf(algorithm, i);
          const MutableElements gradient = a.theta(i);  // the parameters take its place
          kernels.absorb(0, n, of, absorb, {gradient.data, gradient.dtype}, undo_[thread].get());
          Publish(n, {of.arrays[0], algorithm.arrays[0].dtype}, gradient);
        }));
    all.push_back(Pass("publish" + format, state + 2 * w, [=, &a, &algorithm, &kernels](size_t i, int) {
      kernels.publish(0, n, a.StateOf(algorithm, i), publish, a.gradient(i), a.theta(i), nullptr);
    }));
  }

  const Baselines& baselines_;
  Team team_;
  const Arrays arrays_;
  const size_t width_;
  std::vector<OwnedUndoSlot> undo_;  // per thread
  std::unique_ptr<TorchProcess> torch_;
};

// Half of the cores may saturate the memory: the others are the trainer's.
std::vector<int> ThreadCandidates() {
  const int cores = static_cast<int>(AvailableCores().size());
  std::vector<int> counts;
  for (int eighths = 8; eighths >= 1; --eighths) {
    const int count = std::max(1, cores * eighths / 8);
    if (counts.empty() || counts.back() != count) counts.push_back(count);
  }
  return counts;  // from all cores down
}

bool WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  if (file << text && file.flush()) return true;
  std::fprintf(stderr, "adam_bench: cannot write %s\n", path.c_str());
  return false;
}

int Tune(const Baselines& baselines, size_t elements, DType dtype, int repetitions) {
  // What is within this much of the best is as good: fewer threads then.
  constexpr double kAsGood = 1.02;
  const std::vector<size_t> distances{128, 256, 512, 1024, 2048};
  size_t distance = 0;
  double best = 0;
  int workers = 0;
  std::printf("%8s %10s %12s\n", "workers", "prefetch", "ns/element");
  for (const int threads : ThreadCandidates()) {
    const std::vector<size_t> tried = distance == 0 ? distances : std::vector<size_t>{distance};
    const std::vector<double> seconds =
        AdamBench(baselines, elements, dtype, threads, "").TimeDeferred(tried, repetitions);
    for (size_t i = 0; i < tried.size(); ++i) {
      std::printf("%8d %10zu %12.3f\n", threads, tried[i], seconds[i] / static_cast<double>(elements) * 1e9);
    }
    const size_t fastest = std::min_element(seconds.begin(), seconds.end()) - seconds.begin();
    distance = tried[fastest];
    if (best == 0 || seconds[fastest] < best) best = seconds[fastest];
    if (seconds[fastest] <= best * kAsGood) workers = threads;
  }
  const std::string fields = absl::StrCat("worker_threads: ", workers, "\nprefetch_elements: ", distance, "\n");
  std::printf("\n%s", fields.c_str());
  const std::string path = absl::GetFlag(FLAGS_output);
  return path.empty() || WriteFile(path, fields) ? 0 : 1;
}

int DescribeMachine(const Baselines& baselines, size_t elements, DType dtype) {
  const MeasuredMachine machine = MeasureMachine(baselines, elements, dtype, absl::GetFlag(FLAGS_repetitions));
  const std::string text = MachineText(machine, absl::GetFlag(FLAGS_machine_like));
  std::printf("%s", text.c_str());
  return WriteFile(absl::GetFlag(FLAGS_machine_output), text) ? 0 : 1;
}

int Main() {
  if (absl::GetFlag(FLAGS_subnormals)) return RunSubnormals();
  const Baselines* baselines = BaselinesForThisMachine();
  const std::optional<DType> dtype = ParseDType(absl::GetFlag(FLAGS_dtype));
  std::vector<int> threads;
  for (const std::string& word : absl::GetFlag(FLAGS_threads)) {
    if (!absl::SimpleAtoi(word, &threads.emplace_back()) || threads.back() < 1) threads.back() = 0;
  }
  if (threads.empty()) threads.push_back(static_cast<int>(AvailableCores().size()));
  if (baselines == nullptr || !dtype || std::count(threads.begin(), threads.end(), 0) > 0 ||
      absl::GetFlag(FLAGS_repetitions) < 1 || absl::GetFlag(FLAGS_elements) < 1) {
    std::fprintf(stderr,
                 "adam_bench: needs AVX2, NEON or better, a --dtype it knows, and positive numbers; see --help\n");
    return 2;
  }
  const size_t elements = (absl::GetFlag(FLAGS_elements) + kChunkElements - 1) / kChunkElements * kChunkElements;
  if (!absl::GetFlag(FLAGS_machine_output).empty()) return DescribeMachine(*baselines, elements, *dtype);
  if (absl::GetFlag(FLAGS_publish)) {
    std::printf("%s", MeasurePublish(*baselines, elements, *dtype, absl::GetFlag(FLAGS_repetitions)).c_str());
    return 0;
  }
  if (absl::GetFlag(FLAGS_tune)) {
    return Tune(*baselines, elements, *dtype, absl::GetFlag(FLAGS_repetitions));
  }
  for (int count : threads) {
    AdamBench bench(*baselines, elements, *dtype, count, absl::GetFlag(FLAGS_torch));
    const Report report = bench.Run(absl::GetFlag(FLAGS_repetitions));
    const std::string text = absl::GetFlag(FLAGS_json) ? report.JsonLines() : report.Table();
    std::printf("%s", text.c_str());
    if (!absl::GetFlag(FLAGS_json)) {
      std::printf("%s kernels, %s\n\n", std::string(KernelTarget()).c_str(), bench.pages().c_str());
    }
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace superoffload::kernels

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("measures the Adam kernels against the memory's limits and against peers");
  superoffload::EndWithZeroAfterHelp(argc, argv);
  absl::ParseCommandLine(argc, argv);
  char name[] = "adam_bench", interleave[] = "--benchmark_enable_random_interleaving=true";
  char* arguments[] = {name, interleave, nullptr};
  int count = 2;
  benchmark::Initialize(&count, arguments);
  return superoffload::kernels::Main();
}
