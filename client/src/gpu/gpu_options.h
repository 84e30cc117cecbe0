// What a trainer asks for when it gives an attachment GPU memory, checked, and what it is told.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_OPTIONS_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_OPTIONS_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/src/gpu/gpu_layout.h"
#include "client/src/status.h"
#include "superoffload/superoffload_gpu.h"

namespace superoffload::client {

uint32_t SlotCount(const superoffload_gpu_options& options);

// INVALID_ARGUMENT: what no attach response says.
Status CheckOptions(const superoffload_gpu_options& options);

// The buckets, each inside the host's memory of these sizes.
Status ParseBuckets(const superoffload_gpu_options& options, size_t parameters_bytes, size_t gradients_bytes,
                    std::vector<GpuBucket>* buckets);

void CopyText(const std::string& text, std::span<char> field);

// Why something was not done, after what the notes say already.
void Note(const std::string& text, superoffload_gpu_report* report);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_OPTIONS_H_
