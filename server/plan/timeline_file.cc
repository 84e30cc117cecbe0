#include "server/plan/timeline_file.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace superoffload::plan {
namespace {

using simulator::Lane;
using simulator::Span;

constexpr size_t kLanes = std::size(simulator::kLaneNames);
constexpr const char* kTitles[kLanes] = {"step",    "GPU waits",   "GPU",    "link, host to GPU", "link, GPU to host",
                                         "network", "CPU workers", "verdict"};
constexpr const char* kExposedColour = "#cc3311";

// What a span is, for its colour and for the legend: by its lane and the first word of its name.
struct Kind {
  Lane lane;
  const char* word;  // "": any other
  const char* colour;
  const char* meaning;
};

constexpr Kind kKinds[] = {
    {Lane::kStep, "", "#eeeeee", ""},
    {Lane::kExposed, "", kExposedColour, "exposed: the GPU computes nothing"},
    {Lane::kGpu, "forward", "#66ccee", "forward"},
    {Lane::kGpu, "backward", "#2255aa", "backward, with what is computed again"},
    {Lane::kGpu, "", "#999999", "other kernels"},
    {Lane::kH2D, "", "#228833", "parameters"},
    {Lane::kD2H, "", "#ccbb44", "gradients"},
    {Lane::kNetwork, "gather", "#44aa99", "gathering parameters"},
    {Lane::kNetwork, "", "#882255", "reducing gradients"},
    {Lane::kCpu, "absorb", "#ddaa77", "absorb"},
    {Lane::kCpu, "speculate", "#aa3377", "publish before the verdict (speculate)"},
    {Lane::kCpu, "update", "#cc6699", "publish with the verdict (update)"},
    {Lane::kCpu, "republish", "#663399", "publish again (republish, publish_masters)"},
    {Lane::kCpu, "publish_masters", "#663399", ""},
    {Lane::kCpu, "", "#999999", "other passes"},
    {Lane::kVerdict, "", "#000000", "verdict"},
};

const Kind& KindOf(const Span& span) {
  const std::string_view word = std::string_view(span.name).substr(0, span.name.find(' '));
  for (const Kind& kind : kKinds) {
    if (kind.lane == span.lane && (word == kind.word || *kind.word == '\0')) return kind;
  }
  return kKinds[0];
}

// Seconds by which spans that follow each other may overlap, as sums round.
constexpr double kTouching = 1e-12;

struct Placed {
  const Span* span;
  size_t row;  // of its lane
};

struct Rows {
  std::vector<Placed> spans;                                       // of all lanes, by begin
  std::vector<size_t> rows_of_lane = std::vector<size_t>(kLanes);  // 0: there is nothing in it, and it is not shown
};

// The first row of the lane in which it does not overlap with another.
Rows PlaceInRows(std::span<const Span> spans) {
  std::vector<const Span*> sorted;
  for (const Span& span : spans) sorted.push_back(&span);
  std::stable_sort(sorted.begin(), sorted.end(), [](const Span* a, const Span* b) { return a->begin < b->begin; });
  Rows rows;
  std::vector<std::vector<double>> ends(kLanes);
  for (const Span* span : sorted) {
    std::vector<double>& lane = ends[static_cast<size_t>(span->lane)];
    size_t row = 0;
    while (row < lane.size() && lane[row] > span->begin + kTouching) ++row;
    if (row == lane.size()) lane.push_back(0);
    lane[row] = span->end;
    rows.spans.push_back({span, row});
  }
  for (size_t lane = 0; lane < kLanes; ++lane) rows.rows_of_lane[lane] = ends[lane].size();
  return rows;
}

std::string XmlText(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        escaped += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return escaped;
}

std::string JsonText(const std::string& text) {
  std::string escaped = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') escaped += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      escaped += absl::StrFormat("\\u%04x", static_cast<int>(c));
    } else {
      escaped += c;
    }
  }
  return escaped + "\"";
}

double EndOf(std::span<const Span> spans) {
  double end = 0;
  for (const Span& span : spans) end = std::max(end, span.end);
  return end;
}

struct Axis {
  double end = 1;  // seconds
  double tick = 1;
  double per_second = 1;
  const char* unit = "s";
};

// Ticks are 1, 2 or 5 times a power of ten, about ten of them, in the unit in which they are whole numbers.
Axis AxisOf(double end) {
  Axis axis{.end = std::max(end, 1e-9)};
  const double rough = axis.end / 10, power = std::pow(10, std::floor(std::log10(rough)));
  axis.tick = 10 * power;
  for (const double factor : {5.0, 2.0, 1.0}) {
    if (factor * power >= rough) axis.tick = factor * power;
  }
  if (axis.tick < 1) axis.per_second = 1e3, axis.unit = "ms";
  if (axis.tick < 1e-3) axis.per_second = 1e6, axis.unit = "\u00b5s";
  return axis;
}

// Units of the viewBox.
constexpr double kLeft = 150, kWidth = 1600, kRight = 30, kTop = 44, kGap = 12, kLegendLine = 20, kLegendColumn = 320;
constexpr size_t kLegendColumns = 5;

class Picture {
 public:
  Picture(std::span<const Span> spans, const std::string& title)
      : rows_(PlaceInRows(spans)), axis_(AxisOf(EndOf(spans))), title_(title) {
    double bottom = kTop;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      tops_.push_back(bottom);
      heights_.push_back(HeightOf(lane));
      if (heights_[lane] > 0) bottom += heights_[lane] + kGap;
    }
    bottom_ = bottom;
  }

  std::string Draw() && {
    const std::vector<const Kind*> kinds = Legend();
    const double legend = bottom_ + 56;
    const size_t lines = (kinds.size() + kLegendColumns - 1) / kLegendColumns;
    const double width = kLeft + kWidth + kRight, height = legend + kLegendLine * static_cast<double>(lines) + 4;
    absl::StrAppendFormat(&svg_,
                          "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
                          "height=\"%.0f\" font-family=\"sans-serif\" font-size=\"13\">\n"
                          "<title>%s</title>\n<rect width=\"%.0f\" height=\"%.0f\" fill=\"white\"/>\n",
                          width, height, width, height, XmlText(title_), width, height);
    Text(8, 24, title_, "font-size=\"16\"");
    DrawExposed();
    DrawAxis();
    for (const Placed& placed : rows_.spans) Bar(placed);
    DrawLaneTitles();
    for (size_t i = 0; i < kinds.size(); ++i) {
      const double x = kLeft + kLegendColumn * static_cast<double>(i % kLegendColumns);
      const double y = legend + kLegendLine * static_cast<double>(i / kLegendColumns);
      absl::StrAppendFormat(&svg_,
                            "<rect class=\"legend\" x=\"%.0f\" y=\"%.0f\" width=\"12\" height=\"12\" fill=\"%s\"/>", x,
                            y - 11, kinds[i]->colour);
      Text(x + 18, y, kinds[i]->meaning, "");
    }
    return std::move(svg_) + "</svg>\n";
  }

 private:
  // Rows need a height that can be seen; a lane of many workers becomes taller.
  double HeightOf(size_t lane) const {
    const double rows = static_cast<double>(rows_.rows_of_lane[lane]);
    return rows == 0 ? 0 : std::clamp(3 * rows, 34.0, 260.0);
  }
  // What has a meaning and is drawn; kinds of a lane with one colour have one entry.
  std::vector<const Kind*> Legend() const {
    std::set<std::pair<Lane, std::string_view>> drawn;
    for (const Placed& placed : rows_.spans) drawn.emplace(placed.span->lane, KindOf(*placed.span).colour);
    std::vector<const Kind*> legend;
    for (const Kind& kind : kKinds) {
      if (*kind.meaning != '\0' && drawn.contains({kind.lane, kind.colour})) legend.push_back(&kind);
    }
    return legend;
  }
  double X(double seconds) const { return kLeft + seconds / axis_.end * kWidth; }

  void Text(double x, double y, const std::string& text, const char* attributes) {
    absl::StrAppendFormat(&svg_, "<text x=\"%.1f\" y=\"%.1f\" %s>%s</text>\n", x, y, attributes, XmlText(text));
  }

  // Exposed time goes through all lanes, so that one sees what they do meanwhile.
  void DrawExposed() {
    for (const Placed& placed : rows_.spans) {
      if (placed.span->lane != Lane::kExposed) continue;
      absl::StrAppendFormat(&svg_,
                            "<rect class=\"exposed\" x=\"%.2f\" y=\"%.0f\" width=\"%.2f\" height=\"%.0f\" fill=\"%s\" "
                            "fill-opacity=\"0.12\"/>\n",
                            X(placed.span->begin), kTop, WidthOf(*placed.span), bottom_ - kTop, kExposedColour);
    }
  }

  void DrawAxis() {
    for (int i = 0; i * axis_.tick <= axis_.end * (1 + 1e-9); ++i) {
      const double at = i * axis_.tick;
      absl::StrAppendFormat(&svg_, "<line x1=\"%.1f\" y1=\"%.0f\" x2=\"%.1f\" y2=\"%.0f\" stroke=\"#cccccc\"/>\n",
                            X(at), kTop, X(at), bottom_ + 4);
      const std::string label = absl::StrFormat("%.10g", at * axis_.per_second);
      Text(X(at), bottom_ + 18, label, "class=\"tick\" text-anchor=\"middle\"");
    }
    Text(kLeft + kWidth / 2, bottom_ + 35, absl::StrCat("time, ", axis_.unit), "class=\"unit\" text-anchor=\"middle\"");
  }

  void DrawLaneTitles() {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      if (heights_[lane] > 0) Text(8, tops_[lane] + heights_[lane] / 2 + 4, kTitles[lane], "");
    }
  }

  double WidthOf(const Span& span) const { return std::max(0.3, (span.end - span.begin) / axis_.end * kWidth); }

  void Bar(const Placed& placed) {
    const Span& span = *placed.span;
    const size_t lane = static_cast<size_t>(span.lane);
    const double height = heights_[lane] / static_cast<double>(rows_.rows_of_lane[lane]);
    const double width = span.lane == Lane::kVerdict ? std::max(2.0, WidthOf(span)) : WidthOf(span);
    const double top = tops_[lane] + height * static_cast<double>(placed.row);
    absl::StrAppendFormat(
        &svg_,
        "<rect class=\"%s\" x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"%s><title>%s: %.6g to "
        "%.6g %s</title></rect>\n",
        std::string(simulator::kLaneNames[lane]), X(span.begin), top, width, height * 0.94, KindOf(span).colour,
        span.lane == Lane::kStep ? " stroke=\"#555555\"" : "", XmlText(span.name), span.begin * axis_.per_second,
        span.end * axis_.per_second, axis_.unit);
    if (span.lane == Lane::kStep) Text(X(span.begin) + 8, top + height / 2 + 4, span.name, "font-weight=\"bold\"");
    if (span.lane == Lane::kVerdict) Text(X(span.begin) + 6, top + height / 2 + 4, span.name, "");
  }

  const Rows rows_;
  const Axis axis_;
  const std::string title_;
  std::vector<double> tops_, heights_;  // by lane; no height: it is not shown
  double bottom_ = 0;
  std::string svg_;
};

}  // namespace

std::string TimelineSvg(std::span<const Span> spans, const std::string& title) { return Picture(spans, title).Draw(); }

std::string TimelineTrace(std::span<const Span> spans, const std::string& title) {
  constexpr size_t kThreadsOfLane = 1000;
  const Rows rows = PlaceInRows(spans);
  std::string json = absl::StrCat(
      "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n"
      "{\"ph\": \"M\", \"pid\": 1, \"tid\": 0, \"ts\": 0, \"name\": \"process_name\", \"args\": {\"name\": ",
      JsonText(title), "}}");
  for (size_t lane = 0; lane < kLanes; ++lane) {
    for (size_t row = 0; row < rows.rows_of_lane[lane]; ++row) {
      const size_t thread = lane * kThreadsOfLane + row + 1;
      const std::string name = row == 0 ? kTitles[lane] : absl::StrCat(kTitles[lane], " ", row + 1);
      absl::StrAppend(&json, ",\n{\"ph\": \"M\", \"pid\": 1, \"tid\": ", thread,
                      ", \"ts\": 0, \"name\": \"thread_name\", \"args\": {\"name\": ", JsonText(name), "}},\n",
                      "{\"ph\": \"M\", \"pid\": 1, \"tid\": ", thread,
                      ", \"ts\": 0, \"name\": \"thread_sort_index\", \"args\": {\"sort_index\": ", thread, "}}");
    }
  }
  for (const Placed& placed : rows.spans) {
    const Span& span = *placed.span;
    const size_t lane = static_cast<size_t>(span.lane);
    absl::StrAppendFormat(
        &json,
        ",\n{\"ph\": \"X\", \"pid\": 1, \"tid\": %d, \"ts\": %.3f, \"dur\": %.3f, \"cat\": \"%s\", \"name\": %s}",
        lane * kThreadsOfLane + placed.row + 1, span.begin * 1e6, std::max(0.0, span.end - span.begin) * 1e6,
        simulator::kLaneNames[lane], JsonText(span.name));
  }
  return json + "\n]}\n";
}

}  // namespace superoffload::plan
