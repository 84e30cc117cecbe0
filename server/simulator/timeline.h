// What happened in a simulated step, and where: the picture that `superoffloadctl plan --timeline` draws.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_TIMELINE_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_TIMELINE_H_

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace superoffload::simulator {

// kStep: a whole step, named after its number and verdict. kExposed: the GPU computes nothing, named after what it
// waits for.
enum class Lane { kStep, kExposed, kGpu, kH2D, kD2H, kNetwork, kCpu, kVerdict };

inline constexpr std::string_view kLaneNames[] = {"step", "exposed", "gpu", "h2d", "d2h", "network", "cpu", "verdict"};

struct Span {
  Lane lane = Lane::kGpu;
  std::string name;
  double begin = 0;  // seconds
  double end = 0;
};

// By the order in which the spans end.
class Timeline {
 public:
  void Add(Lane lane, std::string name, double begin, double end) {
    spans_.push_back({lane, std::move(name), begin, end});
  }

  const std::vector<Span>& spans() const { return spans_; }
  std::vector<Span> Take() { return std::exchange(spans_, {}); }

 private:
  std::vector<Span> spans_;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_TIMELINE_H_
