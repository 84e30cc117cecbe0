#include "kernels/bench/team.h"

#include <pthread.h>
#include <sched.h>

namespace superoffload::kernels {

std::vector<int> AvailableCores() {
  cpu_set_t set;
  std::vector<int> cores;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return {0};
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

Team::Team(int threads) : start_(threads + 1), done_(threads + 1) {
  const std::vector<int> cores = AvailableCores();
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this, i] { RunThread(i); });
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores[i % cores.size()], &set);
    ::pthread_setaffinity_np(threads_.back().native_handle(), sizeof(set), &set);
  }
}

Team::~Team() {
  work_ = nullptr;
  start_.arrive_and_wait();
  for (std::thread& thread : threads_) thread.join();
}

void Team::RunChunks(size_t chunks, const std::function<void(size_t, int)>& work) {
  chunks_ = chunks;
  work_ = &work;
  start_.arrive_and_wait();
  done_.arrive_and_wait();
}

void Team::RunThread(int index) {
  for (;;) {
    start_.arrive_and_wait();
    if (work_ == nullptr) return;
    const size_t count = threads_.size();
    for (size_t chunk = chunks_ * index / count; chunk < chunks_ * (index + 1) / count; ++chunk) (*work_)(chunk, index);
    done_.arrive_and_wait();
  }
}

}  // namespace superoffload::kernels
