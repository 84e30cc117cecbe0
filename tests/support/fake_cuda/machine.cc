#include "tests/support/fake_cuda/machine.h"

#include <array>
#include <map>

#include "tests/support/fake_cuda/launch.h"

namespace superoffload::fake_cuda {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr unsigned kHopperShared = 227 << 10, kLessShared = 99 << 10;
constexpr size_t kContext = 512 * kMiB, kSmallContext = 32 * kMiB, kTableEntry = 8;
constexpr int kRegisters = 64 << 10, kWarp = 32, kMultiprocessors = 132;

// CUdevice_attribute, from 1 on.
constexpr std::array<int, 17> kAttributes = {0,
                                             kMostThreads,
                                             kMostThreads,
                                             kMostThreads,
                                             kMostBlockZ,
                                             kMostGridX,
                                             kMostGridYz,
                                             kMostGridYz,
                                             kSharedBytes,
                                             0,
                                             kWarp,
                                             0,
                                             kRegisters,
                                             0,
                                             0,
                                             0,
                                             kMultiprocessors};

}  // namespace

const Machine* FindMachine(std::string_view name) {
  static const auto* const machines = new std::map<std::string_view, Machine>{
      {"h100-pcie", {"fake GPU", false, false, 8192 * kMiB, kHopperShared, kContext, kTableEntry}},
      {"gh200", {"fake GPU", true, true, 8192 * kMiB, kHopperShared, kContext, 0}},  // it uses the host's page tables
      {"hmm", {"fake GPU", true, false, 8192 * kMiB, kLessShared, kContext, kTableEntry}},
      {"mig", {"fake GPU MIG 1g", false, false, 256 * kMiB, kHopperShared, kSmallContext, kTableEntry}}};
  const auto found = machines->find(name);
  return found == machines->end() ? nullptr : &found->second;
}

int LaunchAttribute(int attribute) {
  return attribute > 0 && attribute < static_cast<int>(kAttributes.size()) ? kAttributes[static_cast<size_t>(attribute)]
                                                                           : 0;
}

}  // namespace superoffload::fake_cuda
