#include "server/simulator/fit.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "kernels/gpu/unit_memory.h"
#include "server/simulator/catalogue.h"
#include "server/simulator/model_layout.h"

namespace superoffload::simulator {
namespace {

uint64_t BytesOf(const std::vector<MemoryItem>& items, const std::string& purpose) {
  for (const MemoryItem& item : items) {
    if (item.purpose == purpose) return item.bytes;
  }
  return 0;
}

TEST(ActivationsTest, AGptStoresWhatThePaperSaysButDropoutMasks) {
  // Korthikanti et al. 2022, equation 1: s*b*h*(34 + 5*a*s/h), of which 2 are masks, and of the 5 three.
  const Architecture a = FindModel("gpt2-10b")->architecture;
  const double log_sum_exps = 4.0 * static_cast<double>(a.query_heads);
  EXPECT_DOUBLE_EQ(BlockBytesPerToken(a) - log_sum_exps, 32.0 * static_cast<double>(a.hidden));
  EXPECT_DOUBLE_EQ(ScoreBytesPerToken(a, 2048), 6.0 * 2048 * static_cast<double>(a.query_heads));
}

TEST(ActivationsTest, CheckpointsKeepTheInputsOfBlocks) {
  const Architecture a = FindModel("llama-8b")->architecture;
  const Pass full{.batch = 2, .sequence = 4096};
  EXPECT_DOUBLE_EQ(ActivationsOf(a, full).blocks, 2 * 4096 * 33 * 2.0 * 4096);
  const Pass none{.batch = 2, .sequence = 4096, .checkpointing = Checkpointing::kNone};
  EXPECT_GT(ActivationsOf(a, none).blocks, 10 * ActivationsOf(a, full).blocks);
}

TEST(ActivationsTest, InputsThatWaitOnTheHostLeaveTwoOfThem) {
  const Architecture a = FindModel("llama-8b")->architecture;
  const double input = 4096 * 2.0 * 4096;
  const double gpu[] = {33, 33, 33, 33 - 14, 3};
  const uint32_t gone[] = {0, 1, 2, 16, 32};
  for (size_t i = 0; i < std::size(gone); ++i) {
    const ActivationBytes bytes =
        ActivationsOf(a, {.sequence = 4096, .offloaded_activations = ShareOfBlocks(gone[i], 32)});
    EXPECT_DOUBLE_EQ(bytes.blocks, gpu[i] * input);
    EXPECT_DOUBLE_EQ(bytes.host, gone[i] * input);
  }
}

TEST(ActivationsTest, OnlyStoredScoresMakeSelectiveCheckpointingWorthwhile) {
  const Architecture a = FindModel("llama-8b")->architecture;
  Pass pass{.sequence = 4096, .checkpointing = Checkpointing::kNone};
  Pass selective = pass;
  selective.checkpointing = Checkpointing::kSelective;
  EXPECT_DOUBLE_EQ(ActivationsOf(a, pass).blocks, ActivationsOf(a, selective).blocks);
  pass.attention = selective.attention = Attention::kEager;
  EXPECT_GT(ActivationsOf(a, pass).blocks, ActivationsOf(a, selective).blocks);
}

TEST(ActivationsTest, ChunksOfALossAreThoseOfLiger) {
  // Its kernel's own example: 4 x 4096 tokens, 32000 words, 4096 hidden give 2048 tokens.
  Architecture a = FindModel("llama-8b")->architecture;
  a.vocabulary = 32000;
  EXPECT_EQ(LossChunk(a, {.batch = 4, .sequence = 4096, .loss = Loss::kChunked}), 2048u);
  EXPECT_EQ(LossChunk(a, {.batch = 4, .sequence = 5000, .loss = Loss::kChunked}), 4096u);
  EXPECT_EQ(LossChunk(a, {.batch = 1, .sequence = 1, .loss = Loss::kChunked}), 1u);
  a.vocabulary = 4000;  // no more than the hidden state: one chunk
  EXPECT_EQ(LossChunk(a, {.batch = 1, .sequence = 5000, .loss = Loss::kChunked}), 5000u);
}

TEST(ActivationsTest, AChunkedLossKeepsAChunksLogitsAndGradients) {
  const Architecture a = FindModel("gpt-oss-20b")->architecture;
  const ActivationBytes whole = ActivationsOf(a, {.sequence = 32768});
  const ActivationBytes chunked = ActivationsOf(a, {.sequence = 32768, .loss = Loss::kChunked});
  EXPECT_DOUBLE_EQ(whole.head, 32768 * 201088.0 * 10);
  EXPECT_DOUBLE_EQ(chunked.head, 512 * 201088.0 * 10 + 32768 * 2880.0 * 2 + 201088 * 2880.0 * 2);
  EXPECT_DOUBLE_EQ(chunked.blocks, whole.blocks);
  EXPECT_DOUBLE_EQ(chunked.working, whole.working);
  EXPECT_DOUBLE_EQ(chunked.peak(), chunked.blocks + chunked.working) << "the head is no longer what takes the most";
}

TEST(FitTest, AChunkedLossTriplesTheLongestSequence) {
  const Model model = *FindModel("llama-8b");
  const engine::Layout layout = LayoutOf(model);
  constexpr uint64_t kMemory = 96'000'000'000;
  const uint64_t whole = LargestSequence(model, layout, {}, {.allocator_reserve = 0}, kMemory);
  const uint64_t chunked = LargestSequence(model, layout, {.loss = Loss::kChunked}, {.allocator_reserve = 0}, kMemory);
  EXPECT_EQ(whole, 49645u);
  EXPECT_GT(chunked, 2.8 * static_cast<double>(whole));
}

TEST(FitTest, ALossInChunksSaysWhatItKeeps) {
  const Model model = *FindModel("llama-8b");
  const engine::Layout layout = LayoutOf(model);
  const auto logits = [&](Loss loss, uint64_t sequence) {
    for (const MemoryItem& item : GpuMemory(model, layout, {.sequence = sequence, .loss = loss}, {}, 1)) {
      if (item.purpose == "logits") return item.formula;
    }
    return std::string();
  };
  EXPECT_THAT(logits(Loss::kWhole, 4096), ::testing::HasSubstr("1 x 4096 tokens x 128256 x 10 bytes"));
  EXPECT_THAT(logits(Loss::kChunked, 64), ::testing::HasSubstr("of a chunk of 2 tokens x 128256"));
  EXPECT_EQ(logits(Loss::kChunked, 16384), "") << "a block's working memory is larger";
}

TEST(ActivationsTest, LatentsNarrowValuesAndSharedExpertsAreCounted) {
  const Architecture plain{.layers = 2,
                           .hidden = 8,
                           .query_heads = 2,
                           .key_value_heads = 2,
                           .head_dimension = 6,
                           .feed_forward = 10,
                           .vocabulary = 8,
                           .experts = 4,
                           .experts_per_token = 1};
  Architecture latent = plain;
  latent.value_head_dimension = 4;  // of each head: the value and the output are 2 narrower
  latent.query_latent = 5;
  latent.key_value_latent = 3;
  EXPECT_DOUBLE_EQ(BlockBytesPerToken(latent) - BlockBytesPerToken(plain), 2.0 * (2 * (5 + 3) - 2 * 2 * 2));
  Architecture shared = plain;
  shared.shared_experts = 1;  // its input, what its nonlinearity takes and what its last product takes
  EXPECT_DOUBLE_EQ(BlockBytesPerToken(shared) - BlockBytesPerToken(plain), 2.0 * (8 + 2 * 10));
}

TEST(FitTest, TheLargestBatchFitsAndOneMoreDoesNot) {
  const Model model = *FindModel("llama-8b");
  const engine::Layout layout = LayoutOf(model);
  constexpr uint64_t kMemory = 96'000'000'000;
  Pass pass{.sequence = 4096};
  const uint64_t batch = LargestBatch(model, layout, pass, {}, kMemory);
  ASSERT_GT(batch, 1u);
  pass.batch = batch;
  EXPECT_LE(TotalBytes(GpuMemory(model, layout, pass, {}, kMemory)), kMemory);
  const uint64_t sequence = LargestSequence(model, layout, pass, {}, kMemory);
  EXPECT_GE(sequence, pass.sequence);
  pass.batch = batch + 1;
  EXPECT_GT(TotalBytes(GpuMemory(model, layout, pass, {}, kMemory)), kMemory);
}

TEST(FitTest, BlocksThatStreamTakeTheirSlotsOnly) {
  const Model model = *FindModel("llama-8b");
  const engine::Layout layout = LayoutOf(model);
  const auto bytes = [&](const std::string& purpose, const GpuUse& use) {
    uint64_t sum = 0;
    for (const MemoryItem& item : GpuMemory(model, layout, {}, use, 1)) sum += item.purpose == purpose ? item.bytes : 0;
    return sum;
  };
  const uint64_t whole = bytes("parameters", {}), all = bytes("parameters", {.streamed_weights = 1});
  const uint64_t block = (whole - all) / 32;
  EXPECT_EQ(bytes("stream slots", {}), 0u);
  for (const uint32_t slots : {1, 3, 40}) {
    const double taken = static_cast<double>(bytes("stream slots", {.streamed_weights = 1, .stream_slots = slots}));
    const double exact = static_cast<double>(std::min(slots, 32u) * block);
    EXPECT_GE(taken, exact);
    EXPECT_LE(taken, exact + std::min(slots, 32u) * static_cast<double>(kernels::kUnitGranule));
  }
  EXPECT_NEAR(static_cast<double>(whole - bytes("parameters", {.streamed_weights = 0.5})),
              static_cast<double>(16 * block), 16 * 4096.0);
}

TEST(FitTest, NothingFitsWhereTheParametersDoNot) {
  const Model model = *FindModel("llama-70b");
  const engine::Layout layout = LayoutOf(model);
  EXPECT_EQ(LargestBatch(model, layout, {}, {}, 96'000'000'000), 0u);
  EXPECT_EQ(LargestSequence(model, layout, {}, {}, 96'000'000'000), 0u);
}

TEST(FitTest, LearnedPositionsLimitTheSequence) {
  const Model model = *FindModel("gpt2-1b");
  EXPECT_EQ(LargestSequence(model, LayoutOf(model), {}, {}, 96'000'000'000), 2048u);
}

TEST(FitTest, AccumulationKeepsAllGradients) {
  const Model model = *FindModel("llama-8b");
  const engine::Layout layout = LayoutOf(model);
  const std::vector<MemoryItem> once = GpuMemory(model, layout, {}, {}, 1);
  const std::vector<MemoryItem> twice = GpuMemory(model, layout, {}, {.accumulation = 2}, 1);
  EXPECT_EQ(BytesOf(twice, "gradients"), 2 * ParameterCount(model));
  EXPECT_LT(BytesOf(once, "gradients"), BytesOf(twice, "gradients") / 5);
}

TEST(FitTest, SumsOnTheHostLeaveABlocksGradients) {
  const Model model = *FindModel("llama-8b");
  const engine::Layout layout = LayoutOf(model);
  const auto gradients = [&](const GpuUse& use) { return BytesOf(GpuMemory(model, layout, {}, use, 1), "gradients"); };
  EXPECT_EQ(gradients({.accumulation = 4, .sums_on_host = true}), gradients({}));
  EXPECT_GT(gradients({.accumulation = 4}), 10 * gradients({}));
}

TEST(FitTest, RanksKeepShardsOfGradientsAndGatherTwoBlocks) {
  const Model model = *FindModel("llama-8b");
  const engine::Layout shard = LayoutOf(model, {}, 4);
  const std::vector<MemoryItem> once = GpuMemory(model, shard, {}, {.gathers = true}, 1);
  const std::vector<MemoryItem> twice = GpuMemory(model, shard, {}, {.accumulation = 2, .gathers = true}, 1);
  const uint64_t block = BytesOf(once, "gradients");
  EXPECT_NEAR(static_cast<double>(BytesOf(twice, "gradients") - block),
              2.0 * static_cast<double>(ParameterCount(model)) / 4, 1e6);
  const uint64_t norm = 2 * 4096;  // the head's, besides a matrix that is as large as the embedding
  EXPECT_EQ(BytesOf(once, "gathered blocks"), 2 * block - norm);
}

TEST(FitTest, ResidentBucketsTakeTheirStateAndGradient) {
  const Model model = *FindModel("llama-8b");
  const engine::Layout layout = LayoutOf(model);
  const std::vector<MemoryItem> items = GpuMemory(model, layout, {}, {.resident_buckets = 2}, 1);
  const size_t n = layout.buckets.size();
  EXPECT_EQ(BytesOf(items, "resident buckets"), 14 * (layout.buckets[n - 1].elements + layout.buckets[n - 2].elements));
  // More than there are: all.
  const std::vector<MemoryItem> all = GpuMemory(model, layout, {}, {.resident_buckets = 1u << 30}, 1);
  EXPECT_EQ(BytesOf(all, "resident buckets"), 14 * layout.state_elements());
}

TEST(FitTest, ParametersAndSlotsHaveTheLayoutsSizes) {
  const Model model = *FindModel("llama-8b");
  const engine::Layout layout = LayoutOf(model);
  const std::vector<MemoryItem> items = GpuMemory(model, layout, {}, {.device_slots = 3}, 1);
  EXPECT_GE(BytesOf(items, "parameters"), layout.parameters_bytes);
  EXPECT_LT(BytesOf(items, "parameters"), layout.parameters_bytes + 4096);
  const uint64_t sums = engine::kDefaultBucketBytes / 2 / kernels::kChunkElements * sizeof(double);
  EXPECT_EQ(BytesOf(items, "device slots"), 3 * (engine::kDefaultBucketBytes + (sums + 4095) / 4096 * 4096));
}

}  // namespace
}  // namespace superoffload::simulator
