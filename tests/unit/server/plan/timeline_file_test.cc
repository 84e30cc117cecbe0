#include "server/plan/timeline_file.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <vector>

namespace superoffload::plan {
namespace {

using simulator::Lane;
using simulator::Span;
using ::testing::HasSubstr;

const std::vector<Span> kSpans{{Lane::kGpu, "forward <1> & \"more\"", 0, 0.5},
                               {Lane::kCpu, "bucket 3", 0.25, 1},
                               {Lane::kCpu, "bucket 4", 0.5, 0.75},
                               {Lane::kVerdict, "commit", 1, 1}};

TEST(TimelineFileTest, ATraceHasWhatPerfettosImporterNeeds) {
  const nlohmann::json trace = nlohmann::json::parse(TimelineTrace(kSpans, "a \"title\""));
  std::map<int, std::string> threads;
  size_t complete = 0;
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    EXPECT_TRUE(event.at("pid").is_number_integer());
    EXPECT_TRUE(event.at("tid").is_number_integer());
    EXPECT_TRUE(event.at("ts").is_number());
    EXPECT_TRUE(event.at("name").is_string());
    if (event.at("ph") == "M") {
      if (event.at("name") == "thread_name") threads[event.at("tid")] = event.at("args").at("name");
      continue;
    }
    EXPECT_EQ(event.at("ph"), "X");
    EXPECT_GE(event.at("dur").get<double>(), 0);
    EXPECT_TRUE(threads.contains(event.at("tid")));
    ++complete;
  }
  EXPECT_EQ(complete, kSpans.size());
  EXPECT_EQ(threads.size(), 4u);  // three lanes have spans, and the workers a second row
}

TEST(TimelineFileTest, SpansThatOverlapLieInDifferentRows) {
  const nlohmann::json trace = nlohmann::json::parse(TimelineTrace(kSpans, ""));
  std::set<int> rows;
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X" && event.at("cat") == "cpu") rows.insert(event.at("tid").get<int>());
  }
  EXPECT_EQ(rows.size(), 2u);
}

TEST(TimelineFileTest, APictureEscapesNames) {
  const std::string svg = TimelineSvg(kSpans, "t");
  EXPECT_THAT(svg, HasSubstr("forward &lt;1&gt; &amp; &quot;more&quot;"));
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
}

TEST(TimelineFileTest, APictureScalesAndTellsWhatItsColoursMean) {
  const std::string svg = TimelineSvg(std::vector<Span>{{Lane::kStep, "step 7", 0, 2},
                                                        {Lane::kExposed, "a slot", 0, 0.25},
                                                        {Lane::kGpu, "forward 1", 0.25, 1},
                                                        {Lane::kGpu, "backward 1", 1, 2},
                                                        {Lane::kCpu, "absorb", 0, 1},
                                                        {Lane::kCpu, "publish_masters", 1, 2}},
                                      "t");
  EXPECT_THAT(svg, HasSubstr("viewBox=\"0 0 "));
  for (const char* text : {">step 7</text>", ">forward</text>", ">backward, with what is computed again</text>",
                           ">absorb</text>", ">publish again (republish, publish_masters)</text>",
                           ">exposed: the GPU computes nothing</text>", ">time, ms</text>", ">200</text>"}) {
    EXPECT_THAT(svg, HasSubstr(text));
  }
  EXPECT_THAT(svg, ::testing::Not(HasSubstr("gathering")));  // what does not happen is not explained
}

TEST(TimelineFileTest, NothingHappenedIsAPictureToo) {
  EXPECT_THAT(TimelineSvg({}, ""), HasSubstr("<svg"));
  EXPECT_TRUE(nlohmann::json::accept(TimelineTrace({}, "")));
}

}  // namespace
}  // namespace superoffload::plan
