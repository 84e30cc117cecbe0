#include "client/ctl/plan_arguments.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "client/ctl/model_config.h"

namespace superoffload::ctl {
namespace {

using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;

absl::Status Wrong(const std::string& sentence) { return absl::InvalidArgumentError(sentence); }

struct FirstMistake final : google::protobuf::io::ErrorCollector {
  void AddError(int line, int column, const std::string& message) override {
    if (text.empty()) text = absl::StrCat(line + 1, ":", column + 1, ": ", message);
  }
  std::string text;
};

bool NamesFile(const std::string& value) {
  return absl::StrContains(value, "/") || absl::EndsWith(value, ".textproto");
}

// A config.json, or the directory that has one.
bool NamesConfig(const std::string& value) {
  std::error_code error;
  return absl::EndsWith(value, ".json") || std::filesystem::is_directory(value, error);
}

absl::Status ReadText(const std::string& path, google::protobuf::Message* message) {
  std::ifstream file(path);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) return Wrong(absl::StrCat("cannot read ", path));
  FirstMistake mistake;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&mistake);
  if (parser.ParseFromString(text.str(), message)) return absl::OkStatus();
  return Wrong(absl::StrCat(path, ":", mistake.text, " (fields are described in plan.proto)"));
}

// ACTIVATION_CHECKPOINTING_FULL is "full": the enumerators' common prefix is the enum's name.
std::string Word(const EnumDescriptor& type, int index) {
  const std::string& zero = type.value(0)->name();
  const size_t prefix = zero.size() - std::string("UNSPECIFIED").size();
  return absl::AsciiStrToLower(type.value(index)->name().substr(prefix));
}

std::string EnumeratorNames(const EnumDescriptor& type) {
  std::vector<std::string> words;
  for (int i = 1; i < type.value_count(); ++i) words.push_back(Word(type, i));
  return absl::StrJoin(words, ", ");
}

bool IsFlag(const FieldDescriptor& field) {
  return field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE && field.name() != "model_name" &&
         field.name() != "machine_name" && field.name() != "timeline";
}

std::string Takes(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return "true or false";
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return "a number";
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumeratorNames(*field.enum_type());
    case FieldDescriptor::CPPTYPE_STRING:
      return "a name";
    default:
      return "a whole number";
  }
}

// False: `value` is none of the field's.
bool Set(const FieldDescriptor& field, const std::string& value, v1::PlanRequest* request) {
  const google::protobuf::Reflection& reflection = *request->GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL: {
      bool parsed = false;
      if (!absl::SimpleAtob(value, &parsed)) return false;
      reflection.SetBool(request, &field, parsed);
      return true;
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      double parsed = 0;
      if (!absl::SimpleAtod(value, &parsed)) return false;
      reflection.SetDouble(request, &field, parsed);
      return true;
    }
    case FieldDescriptor::CPPTYPE_UINT32: {
      uint32_t parsed = 0;
      if (!absl::SimpleAtoi(value, &parsed)) return false;
      reflection.SetUInt32(request, &field, parsed);
      return true;
    }
    case FieldDescriptor::CPPTYPE_UINT64: {
      uint64_t parsed = 0;
      if (!absl::SimpleAtoi(value, &parsed)) return false;
      reflection.SetUInt64(request, &field, parsed);
      return true;
    }
    case FieldDescriptor::CPPTYPE_STRING:
      reflection.SetString(request, &field, value);
      return true;
    case FieldDescriptor::CPPTYPE_ENUM:
      for (int i = 1; i < field.enum_type()->value_count(); ++i) {
        if (Word(*field.enum_type(), i) != absl::AsciiStrToLower(value)) continue;
        reflection.SetEnumValue(request, &field, field.enum_type()->value(i)->number());
        return true;
      }
      return false;
    default:
      return false;
  }
}

absl::Status SetTimeline(const std::string& path, PlanArguments& arguments) {
  arguments.timeline = path;
  if (absl::EndsWith(path, ".svg")) {
    arguments.request.set_timeline(v1::TIMELINE_FORMAT_SVG);
  } else if (absl::EndsWith(path, ".json")) {
    arguments.request.set_timeline(v1::TIMELINE_FORMAT_TRACE);
  } else {
    return Wrong(absl::StrCat("--timeline is \"", path, "\" but must end with .svg or .json"));
  }
  return absl::OkStatus();
}

absl::Status SetFlag(const std::string& name, const std::string& value, PlanArguments& arguments) {
  v1::PlanRequest& request = arguments.request;
  if (name == "timeline") return SetTimeline(value, arguments);
  if (name == "model" && NamesConfig(value)) return arguments.model_config = value, absl::OkStatus();
  if (name == "model" && NamesFile(value)) return ReadText(value, request.mutable_model());
  if (name == "machine" && NamesFile(value)) return ReadText(value, request.mutable_machine());
  if (name == "model") return request.set_model_name(value), absl::OkStatus();
  if (name == "machine") return request.set_machine_name(value), absl::OkStatus();
  const FieldDescriptor& field = *v1::PlanRequest::descriptor()->FindFieldByName(name);
  if (Set(field, value, &request)) return absl::OkStatus();
  return Wrong(absl::StrCat("--", name, " is \"", value, "\" but must be ", Takes(field)));
}

struct Flag {
  std::string name;
  bool needs_value = true;
};

std::optional<Flag> FindFlag(const std::string& word) {
  const std::string name = absl::StrReplaceAll(word, {{"-", "_"}});
  if (name == "json" || name == "help") return Flag{name, false};
  if (name == "model" || name == "machine" || name == "timeline") return Flag{name};
  const FieldDescriptor* const field = v1::PlanRequest::descriptor()->FindFieldByName(name);
  if (field == nullptr || !IsFlag(*field)) return std::nullopt;
  return Flag{name, field->cpp_type() != FieldDescriptor::CPPTYPE_BOOL};
}

}  // namespace

absl::StatusOr<PlanArguments> ParsePlanArguments(const std::vector<std::string>& words) {
  PlanArguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    const std::optional<Flag> flag =
        absl::StartsWith(words[i], "--") ? FindFlag(words[i].substr(2, equals - 2)) : std::nullopt;
    if (!flag) return Wrong(absl::StrCat("plan has no flag \"", words[i], "\"; see superoffloadctl plan --help"));
    if (flag->name == "json" || flag->name == "help") {
      (flag->name == "json" ? arguments.json : arguments.help) = true;
      continue;
    }
    std::string value = "true";
    if (equals != std::string::npos) {
      value = words[i].substr(equals + 1);
    } else if (flag->needs_value) {
      if (i + 1 == words.size()) return Wrong(absl::StrCat(words[i], " needs a value"));
      value = words[++i];
    }
    if (absl::Status status = SetFlag(flag->name, value, arguments); !status.ok()) return status;
  }
  if (!arguments.model_config.empty() && !arguments.help) {
    absl::StatusOr<v1::ModelDescription> model = ReadModelConfig(arguments.model_config, arguments.request.dtype());
    if (!model.ok()) return model.status();
    *arguments.request.mutable_model() = *std::move(model);
  }
  return arguments;
}

std::string PlanFlags() {
  std::string text;
  const google::protobuf::Descriptor& request = *v1::PlanRequest::descriptor();
  for (int i = 0; i < request.field_count(); ++i) {
    const FieldDescriptor& field = *request.field(i);
    if (IsFlag(field)) absl::StrAppendFormat(&text, "  --%-20s %s\n", field.name(), Takes(field));
  }
  return text;
}

}  // namespace superoffload::ctl
