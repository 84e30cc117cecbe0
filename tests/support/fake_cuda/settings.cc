#include "tests/support/fake_cuda/settings.h"

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace superoffload::fake_cuda {
namespace {

std::mutex stall_mu;
std::condition_variable stall_changed;
std::string stalled_call;
int stalled_threads = 0;
std::atomic<bool> any_stalled = false;

std::vector<int> Uuids() {
  const char* const value = std::getenv("FAKE_CUDA_UUID");
  std::stringstream text(value == nullptr ? "0" : value);
  std::vector<int> uuids;
  for (std::string uuid; std::getline(text, uuid, ',');) uuids.push_back(std::stoi(uuid));
  return uuids;
}

}  // namespace

Machine ThisMachine() {
  const char* const value = std::getenv("FAKE_CUDA_MACHINE");
  const Machine* const named = FindMachine(value == nullptr ? "h100-pcie" : value);
  if (named == nullptr) {
    std::fprintf(stderr, "FAKE_CUDA_MACHINE=%s is none of h100-pcie, gh200, hmm, mig\n", value);
    std::abort();
  }
  Machine machine = *named;
  machine.context_bytes =
      static_cast<size_t>(Setting("FAKE_CUDA_CONTEXT_MIB", static_cast<int>(machine.context_bytes >> 20))) << 20;
  machine.register_cost =
      static_cast<size_t>(Setting("FAKE_CUDA_REGISTER_COST", static_cast<int>(machine.register_cost)));
  machine.peers = Setting("FAKE_CUDA_NO_PEERS") == 0;
  machine.refuses_pageable = Setting("FAKE_CUDA_REFUSE_PAGEABLE") != 0;
  machine.host_is_gpu = Setting("FAKE_CUDA_HOST_IS_GPU") != 0;
  machine.uuids = Uuids();
  return machine;
}

int Setting(const char* variable, int unless_set) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? unless_set : std::atoi(value);
}

int SettingOf(const char* variable, const char* key) {
  const char* const value = std::getenv(variable);
  if (value == nullptr) return 0;
  const std::string text = std::string(",") + value;
  const size_t at = text.find(std::string(",").append(key).append("="));
  return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + std::strlen(key) + 2);
}

bool OutOfMemory() {
  static std::mutex* const mu = new std::mutex;
  static int setting = 0, count = 0;
  std::lock_guard lock(*mu);
  if (const int now = Setting("FAKE_CUDA_OOM"); now != setting) {
    setting = now;
    count = 0;
  }
  return setting != 0 && ++count == setting;
}

void AwaitRelease(const char* call) {
  if (!any_stalled.load(std::memory_order_acquire)) return;
  std::unique_lock lock(stall_mu);
  if (stalled_call != call) return;
  ++stalled_threads;
  stall_changed.notify_all();
  stall_changed.wait(lock, [call] { return stalled_call != call; });
  --stalled_threads;
}

}  // namespace superoffload::fake_cuda

extern "C" {

void fakeCudaStall(const char* call) {
  using namespace superoffload::fake_cuda;
  {
    std::lock_guard lock(stall_mu);
    stalled_call = call == nullptr ? "" : call;
    any_stalled.store(call != nullptr, std::memory_order_release);
  }
  stall_changed.notify_all();
}

void fakeCudaAwaitStalled() {
  using namespace superoffload::fake_cuda;
  std::unique_lock lock(stall_mu);
  stall_changed.wait(lock, [] { return stalled_threads > 0; });
}

}  // extern "C"
