#include "kernels/base/check.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace superoffload {
namespace {

thread_local const CheckScope* innermost = nullptr;

}  // namespace

CheckScope::CheckScope(std::string_view optimizer, uint64_t step)
    : optimizer_(optimizer), step_(step), outer_(innermost) {
  innermost = this;
}

CheckScope::~CheckScope() { innermost = outer_; }

// A line in fixed memory: whoever fails may be out of it, or in the middle of allocating.
class CheckReport {
 public:
  void Add(const check::Value& value) {
    char number[32];
    switch (value.kind_) {
      case check::Value::Kind::kText:
        return AddText(value.text_);
      case check::Value::Kind::kSigned:
        std::snprintf(number, sizeof(number), "%lld", static_cast<long long>(value.integer_));
        break;
      case check::Value::Kind::kUnsigned:
        std::snprintf(number, sizeof(number), "%llu", static_cast<unsigned long long>(value.integer_));
        break;
      case check::Value::Kind::kReal:
        std::snprintf(number, sizeof(number), "%.17g", value.real_);
        break;
    }
    AddText(number);
  }

  void AddScope() {
    if (innermost == nullptr) return;
    Add("; optimizer \"");
    Add(innermost->optimizer_);
    Add("\", step ");
    Add(innermost->step_);
  }

  void Write() {
    line_[length_++] = '\n';
    (void)!::write(STDERR_FILENO, line_, length_);
  }

 private:
  void AddText(std::string_view text) {
    const size_t length = std::min(text.size(), sizeof(line_) - 1 - length_);  // leaves room for the end of the line
    std::memcpy(line_ + length_, text.data(), length);
    length_ += length;
  }

  char line_[1024];
  size_t length_ = 0;
};

namespace check {

void Fail(const char* file, int line, const char* condition, std::initializer_list<Value> values,
          std::initializer_list<Value> message) {
  std::string_view path(file);  // its last folder and name
  if (size_t slash = path.rfind('/'); slash != path.npos && slash > 0) {
    slash = path.rfind('/', slash - 1);
    if (slash != path.npos) path.remove_prefix(slash + 1);
  }
  CheckReport report;
  if (std::getenv("JOURNAL_STREAM") != nullptr) report.Add("<2>");
  report.Add("superoffload: check failed at ");
  report.Add(path);
  report.Add(":");
  report.Add(line);
  report.Add(": ");
  report.Add(condition);
  const char* separator = " (";
  for (const Value& value : values) {
    report.Add(separator);
    report.Add(value);
    separator = ", ";
  }
  if (values.size() > 0) report.Add(")");
  report.AddScope();
  separator = "; ";
  for (const Value& value : message) {
    report.Add(separator);
    report.Add(value);
    separator = "";
  }
  report.Write();
  std::abort();
}

}  // namespace check
}  // namespace superoffload
