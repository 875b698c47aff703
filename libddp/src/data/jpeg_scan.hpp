// SPDX-License-Identifier: Apache-2.0
// Reads a JPEG file's markers without decoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace ddp::detail {

/// Whether `bytes` is one complete plain image (ITU-T T.81): baseline, 8 bits, grey or YCbCr at
/// 4:4:4, 4:2:2, 4:4:0 or 4:2:0, in one scan. The scan must end with the end marker and contain
/// only byte pairs valid in a scan. Other damage is not detected.
bool is_plain_baseline(std::span<const uint8_t> bytes);

/// Decodes images 0 … num_images - 1 with a batch decoder that only reports whether it refused the
/// batch. Bisects refused batches and returns the refused images in order. `decode(first, last)`
/// decodes images [first, last); false: none of them is decoded.
std::vector<size_t> refused_images(size_t num_images,
                                   const std::function<bool(size_t first, size_t last)>& decode);

}  // namespace ddp::detail
