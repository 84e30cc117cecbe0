// Cuts a bucket into the ranges that a pass treats alike, and a chunk into its parts of them.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_SEGMENTS_H_
#define SUPEROFFLOAD_SERVER_ENGINE_SEGMENTS_H_

#include <algorithm>
#include <optional>
#include <vector>

#include "server/engine/bucket_pass.h"
#include "server/engine/layout.h"

namespace superoffload::engine {

// `absorb(parameter)` and `publish(parameter)` return the constants, as std::optional, none for a parameter that had or
// has no gradient. Neighbours with the same constants are one segment, unless each is rounded by itself: as a rule, the
// whole bucket.
template <typename Absorb, typename Publish>
std::vector<Segment> MakeSegments(const Layout& layout, const BucketLayout& bucket, Absorb absorb, Publish publish) {
  std::vector<Segment> segments;
  uint64_t begin = 0;
  for (const Part& part : layout.PartsOf(bucket)) {
    const uint64_t end = begin + part.elements;
    Segment segment{begin, end, part.parameter, absorb(part.parameter), publish(part.parameter)};
    begin = end;
    if (!segment.absorb && !segment.publish) continue;
    Segment* const last = segments.empty() ? nullptr : &segments.back();
    if (last != nullptr && layout.roundings.empty() && last->end == segment.begin && last->absorb == segment.absorb &&
        last->publish == segment.publish) {
      last->end = end;
    } else {
      segments.push_back(segment);
    }
  }
  return segments;
}

// The first segment that ends behind `element`; it may begin behind it as well.
inline std::vector<Segment>::const_iterator FindSegment(const std::vector<Segment>& segments, uint64_t element) {
  const auto behind = [](uint64_t place, const Segment& segment) { return place < segment.end; };
  return std::upper_bound(segments.begin(), segments.end(), element, behind);
}

// Calls body(first, end, segment) for what segments have of chunk `index` of the bucket, which has `n` elements;
// `first` and `end` count from the chunk's beginning.
template <typename Body>
void ForEachSegment(const std::vector<Segment>& segments, size_t index, size_t n, Body body) {
  const uint64_t chunk = index * kernels::kChunkElements;
  for (auto segment = FindSegment(segments, chunk); segment != segments.end() && segment->begin < chunk + n;
       ++segment) {
    body(segment->begin < chunk ? 0 : segment->begin - chunk, std::min<uint64_t>(segment->end - chunk, n), *segment);
  }
}

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_SEGMENTS_H_
