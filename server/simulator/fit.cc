#include "server/simulator/fit.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/gpu/unit_memory.h"
#include "server/engine/spec.h"
#include "server/simulator/model_layout.h"

namespace superoffload::simulator {
namespace {

constexpr uint64_t kRegion = 4096;
constexpr uint64_t RoundUp(uint64_t bytes) { return (bytes + kRegion - 1) / kRegion * kRegion; }

uint64_t GradientBytes(const engine::ParameterSpec& parameter) {
  return engine::ElementCount(parameter) * kernels::DTypeBytes(parameter.gradient_dtype);
}

// All slots are as large as the largest bucket, with one sum of squares for each of its chunks.
uint64_t SlotBytes(const engine::Layout& layout) {
  uint64_t bytes = 0, sums = 0;
  for (const engine::BucketLayout& bucket : layout.buckets) {
    bytes = std::max(bytes, RoundUp(bucket.gradient_bytes()));
    sums = std::max(sums, RoundUp(bucket.chunks() * sizeof(double)));
  }
  return bytes + sums;
}

uint64_t ResidentBytes(const engine::Layout& layout, uint32_t count) {
  uint64_t bytes = 0;
  for (size_t i = layout.buckets.size() - std::min<size_t>(count, layout.buckets.size()); i < layout.buckets.size();
       ++i) {
    bytes += layout.FormatOf(layout.buckets[i]).Bytes(layout.buckets[i].elements) + layout.buckets[i].gradient_bytes();
  }
  return bytes;
}

// Bytes of each unit's parameters or gradients, the most first.
std::vector<uint64_t> UnitBytes(const Model& model, kernels::DType engine::ParameterSpec::* dtype) {
  std::vector<uint64_t> units;
  for (const engine::ParameterSpec& parameter : model.parameters) {
    if (parameter.unit >= units.size()) units.resize(parameter.unit + 1);
    units[parameter.unit] += engine::ElementCount(parameter) * kernels::DTypeBytes(parameter.*dtype);
  }
  std::sort(units.rbegin(), units.rend());
  units.resize(std::max<size_t>(2, units.size()));
  return units;
}

// Of all parameters where passes are accumulated on the GPU; of ranks, each of its shards.
MemoryItem Gradients(const Model& model, const engine::Layout& layout, const GpuUse& use) {
  const uint64_t largest = UnitBytes(model, &engine::ParameterSpec::gradient_dtype)[0];
  if (use.accumulation == 1 || use.sums_on_host) {
    return {"gradients", largest, "of the largest block, until its buckets have left"};
  }
  if (!use.gathers) return {"gradients", AllGradientBytes(model), "of all parameters: they stay from pass to pass"};
  uint64_t shards = 0;
  for (const engine::BucketLayout& bucket : layout.buckets) shards += bucket.gradient_bytes();
  return {"gradients", shards + largest,
          "of the shards, which stay from pass to pass, and of the largest block, until they are reduced"};
}

// Where the parameters are that stream: what they take on the host, and of all slots together.
struct Streamed {
  size_t units = 0;
  uint64_t bytes = 0, slot_bytes = 0;
};

// See client/src/gpu/stream_layout.h: the buckets of a unit lie in a row.
Streamed StreamedOf(const Model& model, const engine::Layout& layout, const GpuUse& use) {
  const std::vector<uint32_t> units =
      StreamedUnits(model.architecture, BucketUses(model, layout), use.streamed_weights);
  std::map<uint32_t, uint64_t> bytes;
  for (uint32_t i = 0; i < units.size(); ++i) {
    if (units[i] != 0) bytes[units[i]] += layout.buckets[i].parameters_bytes();
  }
  Streamed streamed{.units = bytes.size()};
  for (const auto& [unit, of_unit] : bytes) {
    streamed.bytes += of_unit;
    streamed.slot_bytes = std::max(streamed.slot_bytes, kernels::WholeGranules(RoundUp(of_unit) + kRegion));
  }
  return streamed;
}

// How many of so many blocks it takes at least; nothing: not even all suffice.
template <typename Fits>
std::optional<uint32_t> Fewest(uint32_t blocks, Fits fits) {
  if (fits(0)) return 0;
  if (!fits(blocks)) return std::nullopt;
  uint32_t too_few = 0, enough = blocks;
  while (enough - too_few > 1) {
    const uint32_t middle = too_few + (enough - too_few) / 2;
    (fits(middle) ? enough : too_few) = middle;
  }
  return enough;
}

// Of what a double holds; more than any memory has stays more.
uint64_t Bytes(double bytes) { return static_cast<uint64_t>(std::min(bytes, 1e18)); }

// `fits` holds up to some number from 1 on, and no further.
template <typename Fits>
uint64_t Largest(Fits fits) {
  constexpr uint64_t kMost = uint64_t{1} << 32;
  uint64_t good = 0, bad = 1;
  for (; bad <= kMost && fits(bad); bad *= 2) good = bad;
  while (bad - good > 1) {
    const uint64_t middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

std::string LogitFormula(const Architecture& a, const Pass& pass) {
  if (pass.loss == Loss::kChunked) {
    return absl::StrCat("of a chunk of ", LossChunk(a, pass), " tokens x ", a.vocabulary, " x ", kLogitBytes,
                        " bytes; the hidden states' gradient; a chunk's part of the head's gradient");
  }
  return absl::StrCat(pass.batch, " x ", pass.sequence, " tokens x ", a.vocabulary, " x ", kLogitBytes,
                      " bytes: output, fp32 log-softmax, gradient; gone before the blocks' backward");
}

std::string ActivationFormula(const Architecture& a, const Pass& pass) {
  const std::string tokens = absl::StrCat(pass.batch, " x ", pass.sequence, " tokens x ");
  if (pass.checkpointing == Checkpointing::kFull) {
    const uint64_t gone = OffloadedBlocks(a, pass), on_gpu = a.layers - gone + std::min(gone, kInputsUnderWay);
    return absl::StrCat(tokens, on_gpu + 1, " inputs of blocks and of the last norm x 2 x ", a.hidden, " bytes",
                        gone > 0 ? absl::StrCat("; those of the first ", gone, " wait on the host") : "");
  }
  const double scores = pass.checkpointing == Checkpointing::kNone && pass.attention == Attention::kEager
                            ? ScoreBytesPerToken(a, pass.sequence)
                            : 0;
  return absl::StrFormat("%s%d blocks x %.0f bytes%s, and the last norm's input", tokens, a.layers,
                         BlockBytesPerToken(a) + scores, scores > 0 ? ", scores included" : "");
}

}  // namespace

std::vector<MemoryItem> GpuMemory(const Model& model, const engine::Layout& layout, const Pass& pass, const GpuUse& use,
                                  uint64_t memory_bytes) {
  const ActivationBytes activations = ActivationsOf(model.architecture, pass);
  const bool head_is_larger = activations.head > activations.working;
  const Streamed streamed = use.streamed_weights > 0 ? StreamedOf(model, layout, use) : Streamed{};
  std::vector<MemoryItem> items{
      {"parameters", RoundUp(layout.parameters_bytes - streamed.bytes),
       streamed.units > 0 ? "as the daemon publishes them, of all that does not stream"
                          : "as the daemon publishes them"},
      Gradients(model, layout, use),
      {"device slots", use.device_slots * SlotBytes(layout),
       absl::StrCat(use.device_slots, " x the largest bucket and its sums of squares")},
      {"activations", Bytes(activations.blocks), ActivationFormula(model.architecture, pass)},
      head_is_larger
          ? MemoryItem{"logits", Bytes(activations.head), LogitFormula(model.architecture, pass)}
          : MemoryItem{"working memory", Bytes(activations.working),
                       "of the block that is in backward: what it computes again, and gradients of activations"},
      {"context", kContextBytes, "CUDA context, kernels and libraries of a PyTorch process, assumed"},
      {"reserve", Bytes(use.allocator_reserve * static_cast<double>(memory_bytes)),
       absl::StrCat(use.allocator_reserve * 100,
                    " % of the memory stays free for the allocator's fragmentation, assumed")}};
  if (streamed.units > 0) {
    const uint64_t slots = std::min<uint64_t>(use.stream_slots, streamed.units);
    items.push_back({"stream slots", slots * streamed.slot_bytes,
                     absl::StrCat(slots, " x the largest of the ", streamed.units, " blocks that stream")});
  }
  if (use.resident_buckets > 0) {
    items.push_back({"resident buckets", ResidentBytes(layout, use.resident_buckets),
                     absl::StrCat("state and gradient of the last ", use.resident_buckets, " buckets")});
  }
  if (use.gathers) {
    const std::vector<uint64_t> units = UnitBytes(model, &engine::ParameterSpec::dtype);
    items.push_back({"gathered blocks", units[0] + units[1],
                     "the two largest blocks whole: one computes, one is fetched; the parameters above are a share"});
  }
  return items;
}

uint64_t TotalBytes(const std::vector<MemoryItem>& items) {
  uint64_t total = 0;
  for (const MemoryItem& item : items) total += item.bytes;
  return total;
}

uint64_t AllGradientBytes(const Model& model) {
  uint64_t bytes = 0;
  for (const engine::ParameterSpec& parameter : model.parameters) bytes += GradientBytes(parameter);
  return bytes;
}

uint64_t LargestBatch(const Model& model, const engine::Layout& layout, Pass pass, const GpuUse& use,
                      uint64_t memory_bytes) {
  return Largest([&](uint64_t batch) {
    pass.batch = batch;
    return TotalBytes(GpuMemory(model, layout, pass, use, memory_bytes)) <= memory_bytes;
  });
}

uint64_t LargestSequence(const Model& model, const engine::Layout& layout, Pass pass, const GpuUse& use,
                         uint64_t memory_bytes) {
  const uint64_t positions = model.architecture.learned_positions;
  const uint64_t largest = Largest([&](uint64_t sequence) {
    pass.sequence = sequence;
    return TotalBytes(GpuMemory(model, layout, pass, use, memory_bytes)) <= memory_bytes;
  });
  return positions > 0 ? std::min(largest, positions) : largest;
}

double ShareOfBlocks(uint32_t count, uint32_t blocks) {
  constexpr double kDigits = 1e4;
  return std::floor(count * kDigits / blocks) / kDigits;
}

std::optional<uint32_t> FewestOffloaded(const Model& model, const engine::Layout& layout, Pass pass, const GpuUse& use,
                                        uint64_t memory_bytes) {
  const auto blocks = static_cast<uint32_t>(model.architecture.layers);
  return Fewest(blocks, [&](uint32_t count) {
    pass.offloaded_activations = ShareOfBlocks(count, blocks);
    return TotalBytes(GpuMemory(model, layout, pass, use, memory_bytes)) <= memory_bytes;
  });
}

std::optional<uint32_t> FewestStreamed(const Model& model, const engine::Layout& layout, const Pass& pass, GpuUse use,
                                       uint64_t memory_bytes) {
  const auto blocks = static_cast<uint32_t>(model.architecture.layers);
  return Fewest(blocks, [&](uint32_t count) {
    use.streamed_weights = ShareOfBlocks(count, blocks);
    return TotalBytes(GpuMemory(model, layout, pass, use, memory_bytes)) <= memory_bytes;
  });
}

}  // namespace superoffload::simulator
