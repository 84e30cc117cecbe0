// Memory that was freed, which malloc keeps for its next callers. A large plan is taken apart in threads that come and
// go, each with a heap of its own, so what one leaves serves no other and nobody is charged for it.
#ifndef SUPEROFFLOAD_SERVER_MEMORY_GIVE_BACK_H_
#define SUPEROFFLOAD_SERVER_MEMORY_GIVE_BACK_H_

#include <cstdint>

namespace superoffload::memory {

// Looking through all heaps takes milliseconds; small plans are not worth it.
inline constexpr uint64_t kGiveBackBytes = 4 << 20;

// The first member of what owns a lot of small pieces: when it is destroyed, which is after all other members, and it
// has counted kGiveBackBytes, the kernel gets what is free.
class GivesBack {
 public:
  explicit GivesBack(uint64_t bytes = 0) : bytes_(bytes) {}
  GivesBack(const GivesBack&) = delete;
  GivesBack& operator=(const GivesBack&) = delete;
  ~GivesBack();

  void Add(uint64_t bytes) { bytes_ += bytes; }

 private:
  uint64_t bytes_;
};

}  // namespace superoffload::memory

#endif  // SUPEROFFLOAD_SERVER_MEMORY_GIVE_BACK_H_
