// Reads members of JSON objects that come from files: what is there is of the right kind and in its range, or refused.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_JSON_FIELDS_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_JSON_FIELDS_H_

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"

namespace superoffload::checkpoint {

class JsonFields {
 public:
  // `json` must be an object and outlive this.
  explicit JsonFields(const nlohmann::json& json) : json_(json) {}

  // An unsigned number from `least` to `most`; `absent` when there is none.
  uint64_t Unsigned(const char* name, std::optional<uint64_t> absent,
                    uint64_t most = std::numeric_limits<uint64_t>::max(), uint64_t least = 0) {
    const auto found = json_.find(name);
    if (found == json_.end() && absent) return *absent;
    if (found != json_.end() && found->is_number_unsigned()) {
      const uint64_t value = found->get<uint64_t>();
      if (value >= least && value <= most) return value;
    }
    Mind(absl::StrCat("\"", name, "\" is no whole number from ", least, " to ", most));
    return least;
  }

  // "" when there is none.
  std::string Text(const char* name) {
    const auto found = json_.find(name);
    if (found == json_.end()) return "";
    if (found->is_string()) return found->get<std::string>();
    Mind(absl::StrCat("\"", name, "\" is no string"));
    return "";
  }

  // What is wrong with the first of them that is; "" if nothing is.
  const std::string& wrong() const { return wrong_; }

 private:
  void Mind(std::string wrong) {
    if (wrong_.empty()) wrong_ = std::move(wrong);
  }

  const nlohmann::json& json_;
  std::string wrong_;
};

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_JSON_FIELDS_H_
