#include "client/src/memory_passes.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/digest/digest.h"

namespace superoffload::client {
namespace {

// What a thread takes at a time: long enough to stream, a multiple of what samples are taken of.
constexpr size_t kPieceBytes = 256 << 10;
// Of work that is worth another thread.
constexpr size_t kThreadBytes = 1 << 20;

struct Piece {
  size_t range;
  size_t begin;
  size_t bytes;
};

std::vector<Piece> Cut(std::span<const superoffload_range> ranges) {
  std::vector<Piece> pieces;
  for (size_t range = 0; range < ranges.size(); ++range) {
    for (size_t begin = 0; begin < ranges[range].bytes; begin += kPieceBytes) {
      pieces.push_back({range, begin, std::min(kPieceBytes, ranges[range].bytes - begin)});
    }
  }
  return pieces;
}

// Calls `work` for every piece, from several threads, until it returns false.
template <typename Work>
void ForEachPiece(std::span<const superoffload_range> ranges, size_t threads, Work work) {
  const std::vector<Piece> pieces = Cut(ranges);
  size_t bytes = 0;
  for (const superoffload_range& range : ranges) bytes += range.bytes;
  std::atomic<size_t> next = 0;  // relaxed: joining the threads orders what they did
  const auto take = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces.size();) {
      if (!work(pieces[i])) next.store(pieces.size(), std::memory_order_relaxed);
    }
  };
  std::vector<std::thread> helpers;
  try {
    for (size_t i = 1; i < std::min(threads, bytes / kThreadBytes); ++i) helpers.emplace_back(take);
  } catch (const std::system_error&) {  // no more threads to be had: those there are do it all
  }
  take();
  for (std::thread& helper : helpers) helper.join();
}

const std::byte* Bytes(const void* memory) { return static_cast<const std::byte*>(memory); }

template <typename Equal>
size_t FindUnequal(std::span<const superoffload_range> ranges, size_t threads, Equal equal) {
  std::atomic<size_t> found = ranges.size();
  ForEachPiece(ranges, threads, [&](const Piece& piece) {
    const superoffload_range& range = ranges[piece.range];
    const std::span<const std::byte> from(Bytes(range.from) + piece.begin, piece.bytes);
    const bool same = equal(from, Bytes(range.to) + piece.begin);
    if (!same) found.store(piece.range, std::memory_order_relaxed);
    return same;
  });
  return found;
}

}  // namespace

void CopyAndDigest(std::span<const superoffload_range> ranges, size_t threads, std::span<uint64_t> digests) {
  std::ranges::fill(digests, 0);
  ForEachPiece(ranges, threads, [&](const Piece& piece) {
    const superoffload_range& range = ranges[piece.range];
    const std::span<const std::byte> from(Bytes(range.from) + piece.begin, piece.bytes);
    const uint64_t seed = piece.begin / kPieceBytes;  // a sum of digests does not know their order
    const uint64_t digest = range.to == nullptr
                                ? kernels::Digest(from, seed)
                                : kernels::CopyAndDigest(from, static_cast<std::byte*>(range.to) + piece.begin, seed);
    std::atomic_ref<uint64_t>(digests[piece.range]).fetch_add(digest, std::memory_order_relaxed);
    return true;
  });
}

void Copy(std::span<const superoffload_range> ranges, size_t threads) {
  ForEachPiece(ranges, threads, [&](const Piece& piece) {
    const superoffload_range& range = ranges[piece.range];
    std::memcpy(static_cast<std::byte*>(range.to) + piece.begin, Bytes(range.from) + piece.begin, piece.bytes);
    return true;
  });
}

size_t FindDifference(std::span<const superoffload_range> ranges, size_t threads) {
  return FindUnequal(ranges, threads, [](std::span<const std::byte> from, const std::byte* to) {
    return std::memcmp(from.data(), to, from.size()) == 0;
  });
}

size_t FindDifferenceInSamples(std::span<const superoffload_range> ranges, size_t threads, uint64_t turn) {
  const size_t place = turn % (kSampleEveryBytes / kernels::kSampleBytes) * kernels::kSampleBytes;
  return FindUnequal(ranges, threads, [place](std::span<const std::byte> from, const std::byte* to) {
    return kernels::SamplesAreEqual(from, to, kSampleEveryBytes, place);
  });
}

}  // namespace superoffload::client
