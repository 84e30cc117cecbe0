// What tests of the engine are repeated for, and how such a test is named: All/SuiteTest.Behaviour/Always_3Threads.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_ENGINE_PARAMETERS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_ENGINE_PARAMETERS_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <tuple>

#include "server/engine/speculation.h"

namespace superoffload::engine {

using EngineParameters = std::tuple<SpeculationPolicy, size_t>;  // policy, worker threads

inline const auto kEveryPolicy =
    ::testing::Values(SpeculationPolicy::kAlways, SpeculationPolicy::kNever, SpeculationPolicy::kAdaptive);

inline std::string EngineParametersName(const ::testing::TestParamInfo<EngineParameters>& info) {
  const auto [policy, threads] = info.param;
  const char* const name = policy == SpeculationPolicy::kAlways  ? "Always"
                           : policy == SpeculationPolicy::kNever ? "Never"
                                                                 : "Adaptive";
  return name + ("_" + std::to_string(threads)) + "Threads";
}

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_ENGINE_PARAMETERS_H_
