// CUresults that calls end with.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_RESULTS_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_RESULTS_H_

namespace superoffload::simulator::cuda_results {

inline constexpr int kOk = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidContext = 201,
                     kEccUncorrectable = 214, kInvalidHandle = 400, kNotFound = 500, kIllegalAddress = 700,
                     kOutOfResources = 701, kAlreadyRegistered = 712, kNotRegistered = 713, kCaptureUnsupported = 900,
                     kCaptureInvalidated = 901, kCaptureIsolation = 905, kCaptureImplicit = 906, kCapturedEvent = 907;

}  // namespace superoffload::simulator::cuda_results

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_RESULTS_H_
