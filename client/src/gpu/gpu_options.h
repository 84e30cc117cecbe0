// What a trainer asks for when it gives an attachment GPU memory, checked, and what it is told.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_OPTIONS_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_OPTIONS_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/src/core/model_layout.h"
#include "client/src/gpu/gpu_layout.h"
#include "client/src/status.h"
#include "superoffload/superoffload_gpu.h"

namespace superoffload::client {

// How many device slots an attachment has that does not say: more leave the trainer less to wait for.
inline constexpr uint32_t kFewSlots = 8, kManySlots = 16;

// Whether kManySlots leave the trainer nearly as much of the GPU's `free_bytes` as kFewSlots do. The bytes are those of
// everything that the attachment lays out there (GpuLayout), parameters included, as if they were not there already.
bool ManySlotsPay(uint64_t few_slots_bytes, uint64_t many_slots_bytes, uint64_t free_bytes);

// INVALID_ARGUMENT: what no attach response says.
Status CheckOptions(const superoffload_gpu_options& options);

// The model's buckets, each inside the host's memory of these sizes. FAILED_PRECONDITION: some stream, and are
// published `in_place` of gradients.
Status ParseBuckets(const ModelLayout& model, size_t parameters_bytes, size_t gradients_bytes, bool in_place,
                    uint32_t stream_slots, std::vector<GpuBucket>* buckets);

void CopyText(const std::string& text, std::span<char> field);

// Why something was not done, after what the notes say already.
void Note(const std::string& text, superoffload_gpu_report* report);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_OPTIONS_H_
