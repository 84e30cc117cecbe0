// Which bucket's parameters are copied to the GPU next, and when.
//
// Parameters change when a step commits and at no other time: what is published before the verdict stays in host
// memory, and a step that is skipped has nothing copied. Of several buckets the one that the next forward pass reads
// first goes first, which is the last one: bucket 0 holds the last layer. Those are published last, too, and copies run
// in the order in which they are issued: so only a few are under way at a time, and the others wait here, where a
// bucket that comes later and is needed earlier passes them. Whoever needs a bucket at once takes it itself.
//
// What is due stays due until it is taken, whatever later steps bring: only newer parameters of the same bucket take
// its place.
#ifndef SUPEROFFLOAD_KERNELS_GPU_UPLOAD_ORDER_H_
#define SUPEROFFLOAD_KERNELS_GPU_UPLOAD_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace superoffload::kernels {

// Not thread-safe. What is told of a step before the latest is of no consequence.
class UploadOrder {
 public:
  // One is copied, and the next one is issued already.
  static constexpr size_t kInFlight = 2;

  struct Upload {
    uint64_t step;
    uint32_t bucket;
  };

  // `in_flight`: taken and not landed, at most, but for those that were taken by name.
  explicit UploadOrder(size_t buckets, size_t in_flight = kInFlight)
      : copied_(buckets, true), comes_(buckets, false), most_(in_flight) {}

  void set_in_flight(size_t in_flight) { most_ = in_flight; }

  // Whether the bucket becomes due when a step commits; true at first. False: it is not due any more.
  void SetCopied(uint32_t bucket, bool copied);

  // The bucket, which becomes due when a step commits, is so now, unless it has become so since SetCopied: whoever
  // has it copied from then on needs what is there, and what is newer comes by itself. Returns whether this made it
  // due.
  bool Fetch(uint32_t bucket);

  // The bucket's parameters are in host memory. `speculative`: the verdict tells whether they stand.
  void OnPublished(uint64_t step, uint32_t bucket, bool speculative);

  void OnVerdict(uint64_t step, bool commits, bool speculation_stands);

  bool IsDue(uint32_t bucket) const;

  // Whether Take() has something.
  bool ready() const { return !due_.empty() && in_flight_ < most_; }

  // The next one. Nothing: none is due, or enough are in flight.
  std::optional<Upload> Take() { return ready() ? TakeAny() : std::nullopt; }

  // This one, however many are in flight. Nothing: it is not due.
  std::optional<Upload> Take(uint32_t bucket);

  // The next one, however many are in flight. Nothing: none is due.
  std::optional<Upload> TakeAny();

  // One that was taken has landed, or failed.
  void OnLanded();

 private:
  struct Verdict {
    bool commits, speculation_stands;
  };
  using Buckets = std::set<uint32_t, std::greater<>>;

  // Whether this is of the latest step.
  bool Follow(uint64_t step);
  void Add(uint32_t bucket);
  void Remove(uint32_t bucket);
  std::optional<Upload> Take(std::map<uint64_t, Buckets>::iterator of_step, uint32_t bucket);

  uint64_t step_ = 0;
  std::optional<Verdict> verdict_;
  std::vector<uint32_t> speculated_;
  std::vector<bool> copied_;
  std::vector<bool> comes_;          // has become due since SetCopied
  std::map<uint64_t, Buckets> due_;  // by step; none is empty
  size_t most_;
  size_t in_flight_ = 0;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_GPU_UPLOAD_ORDER_H_
