#include "kernels/digest/digest.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace superoffload::kernels {
namespace {

__extension__ using Product = unsigned __int128;

constexpr size_t kLineBytes = 64;
constexpr size_t kChains = 4;
constexpr size_t kL1Bytes = 8192;  // what is copied is digested while it is still in the first cache
// So far ahead memory is asked for: while the chains are computed the core sees too few of the loads that follow.
constexpr size_t kPrefetchBytes = 2048;

// The fractional parts of the square roots of the first primes.
constexpr std::array<uint64_t, 2 * kChains> kKeys = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

uint64_t Multiply(uint64_t a, uint64_t b) {
  const Product product = Product{a} * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

class Chains {
 public:
  explicit Chains(uint64_t seed) {
    for (size_t j = 0; j < kChains; ++j) chain_[j] = seed + kKeys[2 * j + 1];
  }

  void AddLines(const std::byte* from, size_t lines) {
    std::array<uint64_t, kChains> chain = chain_;  // in registers
    for (size_t line = 0; line < lines; ++line, from += kLineBytes) {
      __builtin_prefetch(from + kPrefetchBytes);  // harmless where nothing is
      std::array<uint64_t, 2 * kChains> words;
      std::memcpy(words.data(), from, kLineBytes);
      for (size_t j = 0; j < kChains; ++j) {
        chain[j] = Multiply(words[2 * j] ^ kKeys[2 * j], words[2 * j + 1] ^ chain[j]);
      }
    }
    chain_ = chain;
  }

  // `rest`: what is left after whole lines.
  uint64_t Finish(std::span<const std::byte> rest, size_t bytes) {
    if (!rest.empty()) {
      std::array<std::byte, kLineBytes> line{};
      std::memcpy(line.data(), rest.data(), rest.size());
      AddLines(line.data(), 1);
    }
    uint64_t digest = bytes;
    for (size_t j = 0; j < kChains; ++j) digest = Multiply(digest ^ kKeys[2 * j], chain_[j] ^ kKeys[2 * j + 1]);
    return digest;
  }

 private:
  std::array<uint64_t, kChains> chain_;
};

}  // namespace

uint64_t Digest(std::span<const std::byte> from, uint64_t seed) {
  Chains chains(seed);
  const size_t whole = from.size() / kLineBytes * kLineBytes;
  chains.AddLines(from.data(), whole / kLineBytes);
  return chains.Finish(from.subspan(whole), from.size());
}

uint64_t CopyAndDigest(std::span<const std::byte> from, std::byte* to, uint64_t seed) {
  Chains chains(seed);
  const size_t whole = from.size() / kLineBytes * kLineBytes;
  for (size_t begin = 0; begin < whole; begin += kL1Bytes) {
    const size_t count = std::min(kL1Bytes, whole - begin);
    chains.AddLines(from.data() + begin, count / kLineBytes);
    std::memcpy(to + begin, from.data() + begin, count);
  }
  const std::span<const std::byte> rest = from.subspan(whole);
  if (!rest.empty()) std::memcpy(to + whole, rest.data(), rest.size());
  return chains.Finish(rest, from.size());
}

bool SamplesAreEqual(std::span<const std::byte> a, const std::byte* b, size_t every_bytes, size_t place) {
  if (a.size() <= kSampleBytes) return a.empty() || std::memcmp(a.data(), b, a.size()) == 0;
  const size_t last = a.size() - kSampleBytes;
  for (size_t begin = 0; begin < a.size(); begin += every_bytes) {
    const size_t at = std::min(begin + place, last);
    if (std::memcmp(a.data() + at, b + at, kSampleBytes) != 0) return false;
  }
  return true;
}

}  // namespace superoffload::kernels
