#include "server/simulator/link_curve.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/check.h"

namespace superoffload::simulator {

double LinkCurve::BandwidthOf(double bytes) const {
  SUPEROFFLOAD_CHECK(!points.empty() && bytes > 0);
  const auto above = std::upper_bound(points.begin(), points.end(), bytes,
                                      [](double size, const LinkPoint& point) { return size < point.bytes; });
  if (above == points.end()) return points.back().bytes_per_second;
  if (above == points.begin()) return points.front().bytes_per_second * bytes / points.front().bytes;
  const LinkPoint& low = above[-1];
  const double part = std::log(bytes / low.bytes) / std::log(above->bytes / low.bytes);
  return low.bytes_per_second + part * (above->bytes_per_second - low.bytes_per_second);
}

}  // namespace superoffload::simulator
