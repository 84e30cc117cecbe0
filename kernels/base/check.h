// Assertions of our own invariants, in every build. A failed one writes one line to standard error (file, line,
// condition, values, and the optimizer and step that the thread works on), and aborts.
//
//   SUPEROFFLOAD_CHECK(phase == Phase::kOpen, "bucket ", bucket, " of ", buckets);
//   SUPEROFFLOAD_CHECK_LT(index, entries_, "the submission ring");   // prints both values
//
// Never on what a client can send: that is answered with a status. A check costs a comparison; none runs per element,
// and none stands in a source that is compiled once per instruction set.
#ifndef SUPEROFFLOAD_KERNELS_BASE_CHECK_H_
#define SUPEROFFLOAD_KERNELS_BASE_CHECK_H_

#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <type_traits>
#include <utility>

namespace superoffload {

class CheckReport;

// Names what the calling thread works on, until the end of the scope; inner scopes hide outer ones.
class CheckScope {
 public:
  // `optimizer` must outlive the scope.
  CheckScope(std::string_view optimizer, uint64_t step);
  ~CheckScope();
  CheckScope(const CheckScope&) = delete;
  CheckScope& operator=(const CheckScope&) = delete;

 private:
  friend class CheckReport;
  const std::string_view optimizer_;
  const uint64_t step_;
  const CheckScope* const outer_;
};

namespace check {

// A piece of a message.
class Value {
 public:
  template <typename T>
  Value(const T& value) {  // NOLINT: implicit
    if constexpr (std::is_enum_v<T>) {
      SetInteger(static_cast<std::underlying_type_t<T>>(value));
    } else if constexpr (std::is_integral_v<T>) {
      SetInteger(value);
    } else if constexpr (std::is_floating_point_v<T>) {
      kind_ = Kind::kReal;
      real_ = static_cast<double>(value);
    } else if constexpr (std::is_pointer_v<T> && !std::is_convertible_v<T, std::string_view>) {
      SetInteger(reinterpret_cast<uintptr_t>(value));
    } else {
      kind_ = Kind::kText;
      text_ = value;
    }
  }

 private:
  friend class superoffload::CheckReport;
  enum class Kind { kText, kSigned, kUnsigned, kReal };

  template <typename T>
  void SetInteger(T value) {
    kind_ = std::is_signed_v<T> ? Kind::kSigned : Kind::kUnsigned;
    integer_ = static_cast<uint64_t>(value);
  }

  Kind kind_ = Kind::kText;
  std::string_view text_;
  uint64_t integer_ = 0;
  double real_ = 0;
};

[[noreturn, gnu::cold]] void Fail(const char* file, int line, const char* condition,
                                  std::initializer_list<Value> values, std::initializer_list<Value> message);

// Integers compare by value, whatever their signs.
template <typename T>
inline constexpr bool kNumber = std::is_integral_v<T> && !std::is_same_v<T, bool> && !std::is_same_v<T, char>;

template <typename L, typename R>
bool Equal(const L& left, const R& right) {
  if constexpr (kNumber<L> && kNumber<R>) {
    return std::cmp_equal(left, right);
  } else {
    return left == right;
  }
}

template <typename L, typename R>
bool Less(const L& left, const R& right) {
  if constexpr (kNumber<L> && kNumber<R>) {
    return std::cmp_less(left, right);
  } else {
    return left < right;
  }
}

}  // namespace check
}  // namespace superoffload

#define SUPEROFFLOAD_CHECK(condition, ...) \
  (static_cast<bool>(condition) ? void()   \
                                : ::superoffload::check::Fail(__FILE__, __LINE__, #condition, {}, {__VA_ARGS__}))

#define SUPEROFFLOAD_CHECK_EQ(left, right, ...)                                                               \
  SUPEROFFLOAD_CHECK_VALUES(::superoffload::check::Equal(left_value, right_value), #left " == " #right, left, \
                            right __VA_OPT__(, ) __VA_ARGS__)
#define SUPEROFFLOAD_CHECK_LT(left, right, ...)                                                             \
  SUPEROFFLOAD_CHECK_VALUES(::superoffload::check::Less(left_value, right_value), #left " < " #right, left, \
                            right __VA_OPT__(, ) __VA_ARGS__)
#define SUPEROFFLOAD_CHECK_LE(left, right, ...)                                                               \
  SUPEROFFLOAD_CHECK_VALUES(!::superoffload::check::Less(right_value, left_value), #left " <= " #right, left, \
                            right __VA_OPT__(, ) __VA_ARGS__)

// Names of their own: a class may have a member Fail or Less.
#define SUPEROFFLOAD_CHECK_VALUES(holds, text, left, right, ...)                                     \
  [&](const auto& left_value, const auto& right_value) {                                             \
    if (holds) [[likely]]                                                                            \
      return;                                                                                        \
    ::superoffload::check::Fail(__FILE__, __LINE__, text, {left_value, right_value}, {__VA_ARGS__}); \
  }((left), (right))

#endif  // SUPEROFFLOAD_KERNELS_BASE_CHECK_H_
