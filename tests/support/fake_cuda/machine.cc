#include "tests/support/fake_cuda/machine.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

namespace superoffload::fake_cuda {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr unsigned kHopperShared = 227 << 10, kLessShared = 99 << 10;
constexpr size_t kContext = 512 * kMiB, kSmallContext = 32 * kMiB, kTableEntry = 8;

const char* TextOf(const char* variable, const char* unless_set) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? unless_set : value;
}

}  // namespace

const Machine& FindMachine(std::string_view name) {
  static const auto* const machines = new std::map<std::string_view, Machine>{
      {"h100-pcie", {"fake GPU", false, false, 8192 * kMiB, kHopperShared, kContext, kTableEntry}},
      {"gh200", {"fake GPU", true, true, 8192 * kMiB, kHopperShared, kContext, 0}},  // it uses the host's page tables
      {"hmm", {"fake GPU", true, false, 8192 * kMiB, kLessShared, kContext, kTableEntry}},
      {"mig", {"fake GPU MIG 1g", false, false, 256 * kMiB, kHopperShared, kSmallContext, kTableEntry}}};
  const auto found = machines->find(name);
  if (found != machines->end()) return found->second;
  std::fprintf(stderr, "FAKE_CUDA_MACHINE=%s is none of h100-pcie, gh200, hmm, mig\n", std::string(name).c_str());
  std::abort();
}

Machine ThisMachine() {
  Machine machine = FindMachine(TextOf("FAKE_CUDA_MACHINE", "h100-pcie"));
  if (const int mib = Setting("FAKE_CUDA_CONTEXT_MIB", -1); mib >= 0) {
    machine.context_bytes = kMiB * static_cast<size_t>(mib);
  }
  if (const int cost = Setting("FAKE_CUDA_REGISTER_COST", -1); cost >= 0) {
    machine.register_cost = static_cast<size_t>(cost);
  }
  machine.peers = Setting("FAKE_CUDA_NO_PEERS") == 0;
  machine.refuses_pageable = Setting("FAKE_CUDA_REFUSE_PAGEABLE") != 0;
  machine.host_is_gpu = Setting("FAKE_CUDA_HOST_IS_GPU") != 0;
  machine.uuids.clear();
  std::stringstream uuids(TextOf("FAKE_CUDA_UUID", "0"));
  for (std::string uuid; std::getline(uuids, uuid, ',');) machine.uuids.push_back(std::stoi(uuid));
  return machine;
}

int Setting(const char* variable, int unless_set) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? unless_set : std::atoi(value);
}

int SettingOf(const char* variable, const char* key) {
  const std::string text = std::string(",") + TextOf(variable, ""), before = std::string(",") + key + "=";
  const size_t at = text.find(before);
  return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + before.size());
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

}  // namespace superoffload::fake_cuda
