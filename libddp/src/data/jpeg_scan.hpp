// SPDX-License-Identifier: Apache-2.0
// What a JPEG file's markers say, without decoding it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace ddp::detail {

/// Whether `bytes` is one whole image of the plain kind (ITU-T T.81): baseline, 8 bits, grey or
/// YCbCr at 4:4:4, 4:2:2, 4:4:0 or 4:2:0, all in one scan that ends with the end marker and holds
/// no byte pair that no scan can hold. Damage that keeps to such pairs is not seen.
bool is_plain_baseline(std::span<const uint8_t> bytes);

/// Decodes images 0 … num_images - 1 with a decoder of batches that tells only whether it refused
/// one: halves of what was refused until single images are left, which are returned in order.
/// `decode(first, last)` is of those from `first` up to `last`; false: none of them is decoded.
std::vector<size_t> refused_images(size_t num_images,
                                   const std::function<bool(size_t first, size_t last)>& decode);

}  // namespace ddp::detail
