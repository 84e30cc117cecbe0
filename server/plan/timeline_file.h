// Files of a timeline: a picture, and a trace that Perfetto opens.
#ifndef SUPEROFFLOAD_SERVER_PLAN_TIMELINE_FILE_H_
#define SUPEROFFLOAD_SERVER_PLAN_TIMELINE_FILE_H_

#include <span>
#include <string>

#include "server/simulator/timeline.h"

namespace superoffload::plan {

// One band for each lane, time to the right; where spans of a lane overlap, they lie in rows below each other. Steps
// have their names, exposed time is shaded through all lanes, and a legend says what the colours mean. Each bar has a
// class, its lane's name, and a title that a viewer shows under the pointer.
std::string TimelineSvg(std::span<const simulator::Span> spans, const std::string& title);

// The JSON of Chrome's trace events: complete events ("ph": "X") with times in microseconds; a thread for each row of a
// lane, named after it.
std::string TimelineTrace(std::span<const simulator::Span> spans, const std::string& title);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_TIMELINE_FILE_H_
