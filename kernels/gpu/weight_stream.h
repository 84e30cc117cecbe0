// Which unit's parameters each slot of GPU memory (unit_memory.h) holds, and how the next one's get there.
//
// A slot that several units share is given to a unit in this order: parameters of the unit before are not copied there
// any more; the up stream waits for whoever has read them; and from then on the unit's buckets are copied up whenever a
// step publishes them, as those of any bucket are, and once at once, unless they are about to be published. So a unit
// that stays in its slot over a step's end is refreshed without anybody asking. Whoever reads a unit names the stream,
// which then waits for the latest copy.
//
// What is copied is what the last committed step has published: of these buckets the daemon publishes nothing before
// the verdict (SUPEROFFLOAD_FLAG_STILL_READ), and the verdict comes after all that was launched before the step's end.
//
// A unit that has its slot for itself stays: it is copied there at once, when no step is open, and from then on only
// when a step has published it. So the daemon may publish its buckets before the verdict, as any others.
#ifndef SUPEROFFLOAD_KERNELS_GPU_WEIGHT_STREAM_H_
#define SUPEROFFLOAD_KERNELS_GPU_WEIGHT_STREAM_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "kernels/gpu/mover.h"
#include "kernels/gpu/stream_order.h"
#include "kernels/gpu/unit_memory.h"

namespace superoffload::kernels {

struct StreamedUnit {
  uint32_t number = 0;            // as its owner names it
  std::vector<uint32_t> buckets;  // ascending
};

// Those whose numbers the buckets have, ascending. 0: a bucket is of none.
std::vector<StreamedUnit> UnitsOf(std::span<const uint32_t> numbers);

// Thread-safe. The device must be current in every call.
class WeightStream {
 public:
  // Whether the bucket's parameters are those of the step that was ended last. Does not wait.
  using IsFinal = std::function<bool(uint32_t bucket)>;

  // The mover outlives it.
  WeightStream(std::shared_ptr<const GpuDevice> device, std::vector<StreamedUnit> units, Mover* mover)
      : device_(std::move(device)),
        units_(std::move(units)),
        mover_(*mover),
        order_(static_cast<uint32_t>(units_.size())) {}
  ~WeightStream();
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;

  // No bucket is copied up but to a slot that holds it. `slots`: of each unit. No step is open, as in all that copies
  // units that stay.
  CudaStatus Open(std::vector<uint32_t> slots);

  std::optional<uint32_t> Find(uint32_t number) const;  // its index
  std::span<const uint32_t> buckets(uint32_t index) const { return units_[index].buckets; }

  // `stream` waits for the unit's parameters, which are final, and reads them until the slot is another's. What is
  // expected next is on its way then, as far as there are slots.
  CudaStatus Read(uint32_t index, CudaStream stream, const IsFinal& is_final);
  bool Has(uint32_t index) const;
  bool Stays(uint32_t index) const;

  // `end` waits for each stream that has read since a step was ended, which `wait_for` sees to, and stands for them
  // from now on. The thread that ends steps. Returns false where `wait_for` does.
  bool EndStep(CudaStream end, const std::function<bool(CudaStream)>& wait_for);

  // What the slots hold is not worth anything any more.
  CudaStatus Renew();

  // Those of `stays`, by unit, have slots for themselves from now on, and the others take turns at `shared`; waits
  // until nobody reads or fills any. RESOURCE_EXHAUSTED: out of HBM; all is as before.
  CudaStatus Keep(const std::vector<bool>& stays, uint32_t shared, UnitMemory* memory);

  // Waits until nobody reads or fills slots, and has no use for them until Enter() says which ones there are.
  CudaStatus Leave();
  CudaStatus Enter(std::vector<uint32_t> slots);

 private:
  struct Slot {
    uint32_t sharers = 0;           // units
    std::optional<uint32_t> owner;  // of units_
    std::set<CudaStream> readers;   // since it has it, and of those before if nobody has waited for them
  };

  Slot& SlotOf(uint32_t index) { return slots_[slot_of_[index]]; }
  bool IsAlone(uint32_t index) const { return slots_[slot_of_[index]].sharers == 1; }
  CudaStatus Place(uint32_t index);
  void Vacate(Slot* slot);
  void VacateAll();
  CudaStatus FillThoseThatStay();
  CudaStatus WaitForReaders(Slot* slot);
  CudaStatus FetchAhead(std::optional<uint32_t> reading, const IsFinal& is_final);
  CudaStatus Fetch(uint32_t index);

  const std::shared_ptr<const GpuDevice> device_;
  const std::vector<StreamedUnit> units_;
  Mover& mover_;

  mutable std::mutex mu_;  // before the mover's
  StreamOrder order_;
  std::vector<uint32_t> slot_of_;  // by unit
  std::vector<Slot> slots_;
  std::set<CudaStream> reading_;  // since a step was ended
  OwnedEvent read_;               // recorded anew only after the last wait for it was issued
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_GPU_WEIGHT_STREAM_H_
