// Small messages that tests of this folder begin with.
#ifndef SUPEROFFLOAD_TESTS_UNIT_SERVER_RPC_REQUESTS_H_
#define SUPEROFFLOAD_TESTS_UNIT_SERVER_RPC_REQUESTS_H_

#include <cstdint>
#include <string>

#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::rpc {

inline v1::Policies WithLease(int64_t seconds, int32_t nanos) {
  v1::Policies policies;
  policies.mutable_lease()->set_seconds(seconds);
  policies.mutable_lease()->set_nanos(nanos);
  return policies;
}

inline v1::CreateOptimizerRequest OneParameter(const std::string& algorithm) {
  v1::CreateOptimizerRequest request;
  request.set_name("o");
  request.set_algorithm(algorithm);
  v1::Parameter* const parameter = request.add_parameters();
  parameter->set_name("w");
  parameter->set_dtype(v1::DATA_TYPE_BFLOAT16);
  return request;
}

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_TESTS_UNIT_SERVER_RPC_REQUESTS_H_
