#include "client/ctl/config_fields.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace superoffload::ctl {

using google::protobuf::ListValue;
using google::protobuf::Struct;
using google::protobuf::Value;

ConfigFields::ConfigFields(Struct fields, std::string path) : fields_(std::move(fields)), path_(std::move(path)) {}

namespace {

// Protobuf refuses what is nested deeply, but takes minutes for what is nested 100,000 times.
constexpr size_t kMostLevels = 30;

bool IsNestedTooDeeply(const std::string& json) {
  size_t level = 0;
  bool in_string = false;
  for (size_t i = 0; i < json.size() && level <= kMostLevels; ++i) {
    const char c = json[i];
    if (c == '\\') ++i;
    if (c == '"') in_string = !in_string;
    if (in_string) continue;
    if (c == '{' || c == '[') ++level;
    if ((c == '}' || c == ']') && level > 0) --level;
  }
  return level > kMostLevels;
}

}  // namespace

absl::StatusOr<ConfigFields> ConfigFields::Parse(const std::string& json, std::string path) {
  if (IsNestedTooDeeply(json)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is nested more than ", kMostLevels, " levels deep"));
  }
  Struct fields;
  if (const auto status = google::protobuf::util::JsonStringToMessage(json, &fields); !status.ok()) {
    const std::string message(status.message());
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is no JSON object: ", message.substr(0, std::min<size_t>(message.find('\n'), 200))));
  }
  return ConfigFields(std::move(fields), std::move(path));
}

void ConfigFields::Fail(const std::string& sentence) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(path_, ": ", sentence));
}

bool ConfigFields::States(const std::string& name) const { return fields_.fields().contains(name); }

const Value* ConfigFields::Find(const std::string& name) const {
  const auto found = fields_.fields().find(name);
  if (found == fields_.fields().end() || found->second.kind_case() == Value::kNullValue) return nullptr;
  return &found->second;
}

uint64_t ConfigFields::Number(const std::string& name, const Value& value, uint64_t least, uint64_t most) {
  const double number = value.number_value();
  const bool whole = value.kind_case() == Value::kNumberValue && std::floor(number) == number;
  if (whole && number >= static_cast<double>(least) && number <= static_cast<double>(most)) {
    return static_cast<uint64_t>(number);
  }
  const std::string is = value.kind_case() == Value::kNumberValue ? absl::StrFormat("%.12g", number) : "no number";
  Fail(absl::StrCat(name, " is ", is, " but must be a whole number from ", least, " to ", most));
  return least;
}

uint64_t ConfigFields::Stated(std::initializer_list<std::string> names, uint64_t most) {
  std::optional<uint64_t> stated;
  for (const std::string& name : names) {
    const Value* const value = Find(name);
    if (value == nullptr) continue;
    const uint64_t number = Number(name, *value, 1, most);
    if (stated.has_value() && *stated != number) {
      Fail(absl::StrCat(absl::StrJoin(names, " and "), " mean the same but are ", *stated, " and ", number));
    }
    stated = number;
  }
  if (!stated.has_value()) {
    Fail(absl::StrCat(*names.begin(), " is not stated; what transformers would take may be that of another model"));
  }
  return stated.value_or(1);
}

uint64_t ConfigFields::NumberOr(const std::string& name, uint64_t otherwise, uint64_t most) {
  const Value* const value = Find(name);
  return value == nullptr ? otherwise : Number(name, *value, 1, most);
}

uint64_t ConfigFields::CountOr(const std::string& name, uint64_t otherwise) {
  const Value* const value = Find(name);
  return value == nullptr ? otherwise : Number(name, *value, 0, kMostOfConfig);
}

bool ConfigFields::FlagOr(const std::string& name, bool otherwise) {
  const Value* const value = Find(name);
  if (value == nullptr) return otherwise;
  if (value->kind_case() != Value::kBoolValue) Fail(absl::StrCat(name, " must be true or false"));
  return value->bool_value();
}

std::string ConfigFields::Text(const std::string& name) {
  const Value* const value = Find(name);
  if (value != nullptr && value->kind_case() != Value::kStringValue) Fail(absl::StrCat(name, " must be a text"));
  return value == nullptr ? "" : value->string_value();
}

const ListValue* ConfigFields::List(const std::string& name) {
  const Value* const value = Find(name);
  if (value == nullptr) return nullptr;
  if (value->kind_case() != Value::kListValue) Fail(absl::StrCat(name, " must be a list"));
  return &value->list_value();
}

std::vector<uint64_t> ConfigFields::Numbers(const std::string& name) {
  std::vector<uint64_t> numbers;
  if (const ListValue* const list = List(name); list != nullptr) {
    for (const Value& value : list->values()) {
      numbers.push_back(Number(absl::StrCat("a number of ", name), value, 0, kMostOfConfig));
    }
  }
  return numbers;
}

std::optional<std::vector<std::string>> ConfigFields::Texts(const std::string& name) {
  const ListValue* const list = List(name);
  if (list == nullptr) return std::nullopt;
  std::vector<std::string> texts;
  for (const Value& value : list->values()) {
    if (value.kind_case() != Value::kStringValue) Fail(absl::StrCat(name, " must be a list of texts"));
    texts.push_back(value.string_value());
  }
  return texts;
}

}  // namespace superoffload::ctl
