#include "server/plan/timeline_file.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace superoffload::plan {
namespace {

using simulator::Lane;
using simulator::Span;

constexpr size_t kLanes = std::size(simulator::kLaneNames);
constexpr const char* kTitles[kLanes] = {"GPU",     "link, host to GPU", "link, GPU to host",
                                   "network", "CPU workers",       "verdict"};
constexpr const char* kColours[kLanes] = {"#4477aa", "#228833", "#ccbb44", "#66ccee", "#ee6677", "#aa3377"};

struct Placed {
  const Span* span;
  size_t row;  // of its lane
};

struct Rows {
  std::vector<Placed> spans;  // of all lanes, by begin
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
    while (row < lane.size() && lane[row] > span->begin) ++row;
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

// 1, 2 or 5 times a power of ten, so that about ten fit.
double TickSeconds(double end) {
  const double rough = std::max(end, 1e-9) / 10;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

}  // namespace

std::string TimelineSvg(std::span<const Span> spans, const std::string& title) {
  constexpr double kLeft = 150, kWidth = 1600, kTop = 48, kBand = 34, kGap = 12;
  const Rows rows = PlaceInRows(spans);
  const double end = std::max(EndOf(spans), 1e-9);
  const auto x = [&](double seconds) { return kLeft + seconds / end * kWidth; };
  double bottom = kTop;
  double top_of_lane[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) {
    top_of_lane[lane] = bottom;
    if (rows.rows_of_lane[lane] > 0) bottom += kBand + kGap;
  }
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
      "<text x=\"8\" y=\"22\" font-size=\"15\">%s</text>\n",
      kLeft + kWidth + 20, bottom + 30, XmlText(title));
  const double tick = TickSeconds(end);
  for (double at = 0; at <= end * (1 + 1e-9); at += tick) {
    absl::StrAppendFormat(&svg,
                          "<line x1=\"%.1f\" y1=\"%.0f\" x2=\"%.1f\" y2=\"%.0f\" stroke=\"#dddddd\"/>"
                          "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%.4g ms</text>\n",
                          x(at), kTop - 6, x(at), bottom, x(at), bottom + 16, at * 1e3);
  }
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (rows.rows_of_lane[lane] == 0) continue;
    absl::StrAppendFormat(&svg, "<text x=\"8\" y=\"%.1f\">%s</text>\n", top_of_lane[lane] + kBand / 2 + 4,
                          kTitles[lane]);
  }
  for (const Placed& placed : rows.spans) {
    const Span& span = *placed.span;
    const size_t lane = static_cast<size_t>(span.lane);
    const double height = kBand / static_cast<double>(rows.rows_of_lane[lane]);
    absl::StrAppendFormat(&svg,
                          "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"><title>%s: %.4f to "
                          "%.4f ms</title></rect>\n",
                          x(span.begin), top_of_lane[lane] + height * static_cast<double>(placed.row),
                          std::max(0.3, (span.end - span.begin) / end * kWidth), height * 0.94, kColours[lane],
                          XmlText(span.name), span.begin * 1e3, span.end * 1e3);
  }
  return svg + "</svg>\n";
}

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
