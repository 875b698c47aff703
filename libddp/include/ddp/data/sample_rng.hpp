// SPDX-License-Identifier: Apache-2.0
// Random numbers for data sets that augment.
//
//   Example get_for_epoch(int64_t index, int64_t epoch) const {
//     ddp::SampleRng random(seed, epoch, index);
//     const bool flip = random.coin(); …
#pragma once

#include <cmath>
#include <cstdint>

#include "ddp/detail/philox.hpp"

namespace ddp {

/// A stream that is a pure function of (seed, epoch, sample index): equal for any number of ranks
/// and workers, on CPU and GPU, and after a resume. Philox4x32-10 (Salmon et al., SC'11), keyed by
/// the seed. Epochs count modulo 2^32. One object serves one thread.
class SampleRng {
 public:
  /// Starts the stream of sample `index` in `epoch`.
  DDP_HOST_DEVICE SampleRng(uint64_t seed, uint64_t epoch, uint64_t index)
      : key_(seed),
        counter_{{0, static_cast<uint32_t>(epoch), static_cast<uint32_t>(index),
                  static_cast<uint32_t>(index >> 32)}} {}

  /// All 32 bits are random.
  DDP_HOST_DEVICE uint32_t next() {
    if (draw_ % 4 == 0) {
      counter_.word[0] = draw_ / 4;
      block_ = detail::philox4x32(counter_, key_);
    }
    return block_.word[draw_++ % 4];
  }
  /// In [0, 1), with 24 bits: every value is exact in float.
  DDP_HOST_DEVICE float uniform() { return static_cast<float>(next() >> 8) * 0x1p-24f; }
  /// In 0 .. n - 1, n > 0, by multiplication (Lemire). Deviates from uniform by at most n / 2^32.
  DDP_HOST_DEVICE uint32_t below(uint32_t n) {
    return static_cast<uint32_t>((uint64_t{next()} * n) >> 32);
  }
  DDP_HOST_DEVICE bool coin() { return (next() >> 31) != 0; }  ///< true with probability 1/2
  /// A normal number of mean 0 and standard deviation 1, at most 6.67 in size. Takes two draws
  /// (Box-Muller, in double). Mathematical libraries of two systems, or of CPU and GPU, may differ
  /// in the last bit of a float, once in about a hundred million numbers.
  DDP_HOST_DEVICE float normal() {
    constexpr double kTwoPi = 6.283185307179586;
    const double radius = std::sqrt(-2 * std::log((next() + 1.0) * 0x1p-32));  // of (0, 1]
    return static_cast<float>(radius * std::cos(kTwoPi * 0x1p-32 * next()));
  }

 private:
  uint64_t key_;
  detail::Philox4x32 counter_;
  detail::Philox4x32 block_{{0, 0, 0, 0}};
  uint32_t draw_ = 0;
};

}  // namespace ddp
