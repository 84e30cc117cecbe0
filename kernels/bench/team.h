// Threads that share the chunks of the arrays, each always the same contiguous part of them, pinned to its core.
#ifndef SUPEROFFLOAD_KERNELS_BENCH_TEAM_H_
#define SUPEROFFLOAD_KERNELS_BENCH_TEAM_H_

#include <barrier>
#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

namespace superoffload::kernels {

class Team {
 public:
  explicit Team(int threads);
  ~Team();

  // Runs `work(chunk, thread)` for every chunk and returns when all have.
  void RunChunks(size_t chunks, const std::function<void(size_t, int)>& work);

  int threads() const { return static_cast<int>(threads_.size()); }

 private:
  void RunThread(int index);

  std::barrier<> start_, done_;
  const std::function<void(size_t, int)>* work_ = nullptr;  // null: stop
  size_t chunks_ = 0;
  std::vector<std::thread> threads_;
};

// Cores this process may run on.
std::vector<int> AvailableCores();

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_BENCH_TEAM_H_
