// Hyper-parameters of whatever algorithm a test is about.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_SCALARS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_SCALARS_H_

#include <initializer_list>
#include <string_view>
#include <utility>

#include "server/engine/spec.h"

namespace superoffload::test {

// The place of the scalar of that name; null where the algorithm has none.
inline double* FindScalar(const kernels::Algorithm& algorithm, engine::Scalars& scalars, std::string_view name) {
  for (size_t i = 0; i < scalars.size(); ++i) {
    if (algorithm.scalars[i].name == name) return &scalars[i];
  }
  return nullptr;
}

// The algorithm's defaults, but for `named`; what it has no scalar for is left out, so that one list serves all.
inline engine::Scalars ScalarsWith(const kernels::Algorithm& algorithm,
                                   std::initializer_list<std::pair<std::string_view, double>> named) {
  engine::Scalars scalars = algorithm.DefaultScalars();
  for (const auto& [name, value] : named) {
    if (double* const scalar = FindScalar(algorithm, scalars, name); scalar != nullptr) *scalar = value;
  }
  return scalars;
}

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_SCALARS_H_
