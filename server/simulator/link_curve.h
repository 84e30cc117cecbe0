// The bandwidth of one direction of the link between CPU and GPU, by the size of a copy: small copies are slower,
// because each has a fixed cost. The cost of starting a copy is in the curve, as measurements have it.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_LINK_CURVE_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_LINK_CURVE_H_

#include <vector>

namespace superoffload::simulator {

struct LinkPoint {
  double bytes = 0;             // of one copy
  double bytes_per_second = 0;  // that it achieves
};

struct LinkCurve {
  std::vector<LinkPoint> points;  // at least one, by growing size

  // Linear in the logarithm of the size between two points. Above the last point its bandwidth; below the first a copy
  // takes as long as one of the first point's size.
  double BandwidthOf(double bytes) const;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_LINK_CURVE_H_
