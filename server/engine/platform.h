// What an engine runs on. In the daemon all of it is real; the simulator (server/simulator) has it in virtual time, and
// no code of the engine can tell.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_PLATFORM_H_
#define SUPEROFFLOAD_SERVER_ENGINE_PLATFORM_H_

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/engine/worker_pool.h"

namespace superoffload::engine {

// This one is the machine's.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const { return absl::Now(); }
};

// What ends the process. A kill may come at any instruction; these are the places between two stores whose order
// recovery relies on. This one ends nothing: real kills come by themselves.
class Deaths {
 public:
  virtual ~Deaths() = default;
  virtual void MayCome() {}
};

inline Clock& RealClock() {
  static Clock clock;
  return clock;
}

inline Deaths& RealDeaths() {
  static Deaths deaths;
  return deaths;
}

// Outlives what runs on it.
struct Platform {
  // Implicit: most of what runs an engine has threads and nothing else to say.
  Platform(WorkerPool* pool) : pool(pool) {}  // NOLINT
  Platform(WorkerPool* pool, Clock* clock, Deaths* deaths) : pool(pool), clock(clock), deaths(deaths) {}

  WorkerPool* pool;
  Clock* clock = &RealClock();
  Deaths* deaths = &RealDeaths();
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_PLATFORM_H_
