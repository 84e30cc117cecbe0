#include "tests/support/fake_cuda/outlive.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "tests/support/fake_cuda/machine.h"

namespace superoffload::fake_cuda {
namespace {

enum State { kFree, kTaken, kUnfinished };

struct Place {
  std::atomic<int> state;
  void* to;
  const void* from;
  size_t bytes;
};

// In memory that both processes have. The helper only reads it, when nobody writes it any longer.
struct Shared {
  std::atomic<int> traces;  // 1: the helper does; less: it cannot
  Place places[256];        // more than there are streams
};

int CountUnfinished(const Shared& shared) {
  const auto unfinished = [](const Place& place) { return place.state == kUnfinished; };
  return static_cast<int>(std::count_if(std::begin(shared.places), std::end(shared.places), unfinished));
}

constexpr char kCannot[] = "FAKE_CUDA_OUTLIVES needs a kernel and a container that allow ptrace\n";

void CloseFiles(unsigned first) { ::syscall(SYS_close_range, first, ~0U, 0); }

void FinishCopies(const Shared& shared, pid_t thread) {
  static char piece[1 << 16];
  for (const Place& place : shared.places) {
    if (place.state != kUnfinished) continue;
    for (size_t done = 0; done < place.bytes;) {
      const size_t bytes = std::min(sizeof(piece), place.bytes - done);
      iovec here{piece, bytes};
      iovec from{static_cast<char*>(const_cast<void*>(place.from)) + done, bytes};
      iovec to{static_cast<char*>(place.to) + done, bytes};
      if (::process_vm_readv(thread, &here, 1, &from, 1, 0) < 0) break;
      if (::process_vm_writev(thread, &here, 1, &to, 1, 0) < 0) break;
      done += bytes;
    }
  }
}

// The child of a process with many threads: system calls only.
[[noreturn]] void BeHelper(Shared* shared, pid_t thread, int outlives) {
  CloseFiles(0);
  shared->traces = ::ptrace(PTRACE_SEIZE, thread, nullptr, PTRACE_O_TRACEEXIT) == 0 ? 1 : -1;
  for (int status = 0; ::waitpid(thread, &status, __WALL) == thread && WIFSTOPPED(status);) {
    if (status >> 8 == (SIGTRAP | PTRACE_EVENT_EXIT << 8)) {
      if (CountUnfinished(*shared) > 0) {
        ::usleep(static_cast<unsigned>(outlives) * 1000);
        FinishCopies(*shared, thread);
      }
    }
    ::ptrace(PTRACE_CONT, thread, nullptr, 0);
  }
  ::_exit(0);
}

Shared* Start(int outlives) {
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  auto* const shared = static_cast<Shared*>(memory);
  std::atomic<pid_t> thread = 0;
  std::thread([&thread] {
    ::unshare(CLONE_FILES);
    CloseFiles(0);
    thread = static_cast<pid_t>(::syscall(SYS_gettid));
    while (true) ::pause();
  }).detach();
  while (thread == 0) ::usleep(100);
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  if (::fork() == 0) BeHelper(shared, thread, outlives);
  while (shared->traces == 0) ::usleep(100);
  if (shared->traces < 0) {
    std::fputs(kCannot, stderr);
    std::abort();
  }
  return shared;
}

// Null: nothing outlives the process.
Shared* Helper() {
  static std::mutex* const mu = new std::mutex;
  static Shared* shared = nullptr;
  const int outlives = Setting("FAKE_CUDA_OUTLIVES");
  std::lock_guard lock(*mu);
  if (shared == nullptr && outlives > 0) shared = Start(outlives);
  return shared;
}

}  // namespace

std::shared_ptr<void> Unfinished(void* to, const void* from, size_t bytes) {
  Shared* const shared = Helper();
  if (shared == nullptr) return nullptr;
  for (Place& place : shared->places) {
    int free = kFree;
    if (!place.state.compare_exchange_strong(free, kTaken)) continue;
    place.to = to;
    place.from = from;
    place.bytes = bytes;
    place.state = kUnfinished;
    return {&place, [](Place* finished) { finished->state = kFree; }};
  }
  std::abort();
}

}  // namespace superoffload::fake_cuda

extern "C" int fakeCudaUnfinishedCopies() {
  using namespace superoffload::fake_cuda;
  const Shared* const shared = Helper();
  return shared == nullptr ? 0 : CountUnfinished(*shared);
}
