// Where a bucket has one slot for its gradients on the host, the next one waits until the daemon has absorbed the last.
// Whatever is submitted after it waits behind it: the daemon gets everything in the order of submission.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_SLOT_WAITS_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_SLOT_WAITS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "client/src/status.h"
#include "superoffload/v1/step_ring.h"

namespace superoffload::client {

class SlotWaits {
 public:
  using Go = std::function<Status()>;

  // Which buckets have one slot. Nothing is pending in any.
  explicit SlotWaits(std::vector<bool> one_slot);

  // Runs it now, or when it is its turn: then an error is of Take. One `go` runs at a time; none may call this.
  Status Submit(Go go);
  Status SubmitGradient(uint32_t bucket, Go go);

  // Whether any bucket has one; else nothing ever waits.
  bool any() const { return any_; }

  // Whatever waits does so for ever, and so does what is submitted later.
  void Stop();

  // Of each completion, in their order.
  Status Take(const superoffload_ring_entry& entry);

 private:
  enum class Slot : uint8_t { kFree, kOfOpenStep, kPending };
  struct Waiting {
    uint32_t bucket;
    Go go;
  };

  Status SubmitBehind(Waiting waiting);
  Status Drain();

  const std::vector<bool> one_slot_;
  const bool any_;
  std::mutex mu_;
  bool stopped_ = false;
  std::vector<Slot> slots_;
  std::deque<Waiting> waiting_;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_SLOT_WAITS_H_
