// Requests and answers that come in pages (optimizer.proto).
#ifndef SUPEROFFLOAD_CLIENT_SRC_CPP_PAGES_H_
#define SUPEROFFLOAD_CLIENT_SRC_CPP_PAGES_H_

#include <algorithm>
#include <cstddef>

#include "superoffload/client.hpp"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload {

inline constexpr size_t kPageBytes = SUPEROFFLOAD_MAX_MESSAGE_BYTES / 2;  // a page ends before it has more

// Each calls `write` with one page after the other, until it returns false.
template <typename Write>
void WritePages(const v1::CreateOptimizerRequest& request, const Write& write) {
  v1::CreateOptimizerRequest page = request;
  if (request.ByteSizeLong() <= kPageBytes) return static_cast<void>(write(page));
  page.clear_groups();
  page.clear_parameters();
  size_t bytes = page.ByteSizeLong();
  bool going_on = true;
  const auto make_room = [&](size_t needed) {
    bytes += needed;
    if (bytes <= kPageBytes) return;
    page.set_more(true);
    going_on = going_on && write(page);
    page.Clear();
    bytes = needed;
  };
  for (const v1::ParameterGroup& group : request.groups()) {
    make_room(group.ByteSizeLong());
    *page.add_groups() = group;
  }
  for (const v1::Parameter& parameter : request.parameters()) {
    make_room(parameter.ByteSizeLong());
    *page.add_parameters() = parameter;
  }
  if (going_on) write(page);
}

template <typename Write>
void WritePages(const v1::AttachOptimizerRequest& request, const Write& write) {
  constexpr int kPageEntries = kPageBytes / sizeof(uint32_t);
  const auto& all = request.parameter_crc32();
  v1::AttachOptimizerRequest page;
  page.set_name(request.name());
  page.set_sync(request.sync());
  for (int first = 0; first == 0 || first < all.size(); first += kPageEntries) {
    const int last = std::min(all.size(), first + kPageEntries);
    page.mutable_parameter_crc32()->Assign(all.begin() + first, all.begin() + last);
    page.set_more(last < all.size());
    if (!write(page)) return;
    page.Clear();
  }
}

}  // namespace superoffload

#endif  // SUPEROFFLOAD_CLIENT_SRC_CPP_PAGES_H_
