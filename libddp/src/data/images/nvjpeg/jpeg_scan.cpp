// SPDX-License-Identifier: Apache-2.0
#include "data/images/nvjpeg/jpeg_scan.hpp"

#include <cstring>

namespace ddp::detail {

namespace {

enum Marker : uint8_t {
  kBaselineFrame = 0xc0,
  kHuffmanTables = 0xc4,
  kFirstRestart = 0xd0,
  kLastRestart = 0xd7,
  kStart = 0xd8,
  kEnd = 0xd9,
  kScan = 0xda,
  kAdobe = 0xee,
};

/// The data after a marker, without the two bytes of length.
using Segment = std::span<const uint8_t>;

bool is_plain_frame(const Segment& frame) {
  // Precision, height, width, number of components; per component id, sampling and table.
  if (frame.size() < 6 || frame[0] != 8 || frame.size() != 6 + size_t{3} * frame[5]) {
    return false;
  }
  if (frame[5] != 1 && frame[5] != 3) {
    return false;
  }
  const auto sampling = [&](size_t component) { return frame[7 + 3 * component]; };
  if (frame[5] == 1) {
    return sampling(0) == 0x11;
  }
  const bool rgb = frame[6] == 'R' && frame[9] == 'G' && frame[12] == 'B';
  const bool known =
      sampling(0) == 0x11 || sampling(0) == 0x12 || sampling(0) == 0x21 || sampling(0) == 0x22;
  return !rgb && known && sampling(1) == 0x11 && sampling(2) == 0x11;
}

/// Adobe's marker ends with the colour transform; 1 is YCbCr.
bool has_other_colours(const Segment& adobe) {
  constexpr size_t kTransform = 11;
  return adobe.size() > kTransform && std::memcmp(adobe.data(), "Adobe", 5) == 0 &&
         adobe[kTransform] != 1;
}

/// Checks a scan from its first byte: 0xff must be followed by 0 or by the next restart marker.
bool ends_well(const uint8_t* at, const uint8_t* end) {
  uint8_t restart = kFirstRestart;
  while ((at = static_cast<const uint8_t*>(std::memchr(at, 0xff, static_cast<size_t>(end - at)))) !=
             nullptr &&
         at + 1 < end) {
    const uint8_t marker = at[1];
    if (marker == kEnd) {
      return true;
    }
    if (marker == restart) {
      restart = restart == kLastRestart ? uint8_t{kFirstRestart} : uint8_t(restart + 1);
    } else if (marker != 0) {
      return false;
    }
    at += 2;
  }
  return false;
}

}  // namespace

bool is_plain_baseline(std::span<const uint8_t> bytes) {
  const uint8_t* at = bytes.data();
  const uint8_t* end = at + bytes.size();
  if (bytes.size() < 4 || at[0] != 0xff || at[1] != kStart) {
    return false;
  }
  at += 2;
  uint8_t num_components = 0;
  bool other_colours = false;
  while (end - at >= 4 && at[0] == 0xff) {
    const uint8_t marker = at[1];
    const ptrdiff_t length = at[2] * 256 + at[3];
    if (length < 2 || end - at < 2 + length) {
      return false;
    }
    const Segment segment(at + 4, static_cast<size_t>(length - 2));
    at += 2 + length;
    if (marker == kScan) {
      // A scan without a preceding frame has no components.
      const bool all = !segment.empty() && num_components != 0 && segment[0] == num_components;
      return all && !(other_colours && num_components == 3) && ends_well(at, end);
    }
    if (marker == kBaselineFrame) {
      if (num_components != 0 || !is_plain_frame(segment)) {
        return false;
      }
      num_components = segment[5];
    } else if ((marker < kScan && marker != kHuffmanTables) || marker == 0xff) {
      return false;  // another kind of frame, arithmetic coding, or an invalid marker
    }
    other_colours = other_colours || (marker == kAdobe && has_other_colours(segment));
  }
  return false;
}

std::vector<size_t> refused_images(size_t num_images,
                                   const std::function<bool(size_t first, size_t last)>& decode) {
  std::vector<size_t> refused;
  const std::function<void(size_t, size_t)> halve = [&](size_t first, size_t last) {
    if (first == last || decode(first, last)) {
      return;
    }
    if (last - first == 1) {
      refused.push_back(first);
      return;
    }
    const size_t middle = first + (last - first) / 2;
    halve(first, middle);
    halve(middle, last);
  };
  halve(0, num_images);
  return refused;
}

}  // namespace ddp::detail
