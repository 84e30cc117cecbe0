// Every event of a run: hashed, so that two runs can be compared, and printed on demand.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_EVENT_LOG_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_EVENT_LOG_H_

#include <cstdint>
#include <cstdio>
#include <string_view>

#include "server/simulator/virtual_time.h"

namespace superoffload::faults {

class EventLog {
 public:
  EventLog(const simulator::VirtualTime* time, bool verbose) : time_(*time), verbose_(verbose) {}

  void Add(std::string_view who, std::string_view what, uint64_t a = 0, uint64_t b = 0) {
    Mix(who);
    Mix(what);
    MixNumber(a);
    MixNumber(b);
    MixNumber(static_cast<uint64_t>(time_.now() * 1e9));
    if (!verbose_) return;
    std::printf("%12.6f %-10.*s %.*s %llu %llu\n", time_.now(), static_cast<int>(who.size()), who.data(),
                static_cast<int>(what.size()), what.data(), static_cast<unsigned long long>(a),
                static_cast<unsigned long long>(b));
  }

  // Bytes that the run ends with.
  void Mix(std::string_view bytes) {
    for (const char byte : bytes) hash_ = (hash_ ^ static_cast<uint8_t>(byte)) * kPrime;
  }

  uint64_t hash() const { return hash_; }

 private:
  static constexpr uint64_t kPrime = 0x100000001b3;  // FNV-1a

  void MixNumber(uint64_t number) { hash_ = (hash_ ^ number) * kPrime; }

  const simulator::VirtualTime& time_;
  const bool verbose_;
  uint64_t hash_ = 0xcbf29ce484222325;
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_EVENT_LOG_H_
