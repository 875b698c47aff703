// SPDX-License-Identifier: Apache-2.0
// What a JPEG file's markers say, without decoding it.
#pragma once

#include <cstdint>
#include <vector>

namespace ddp::detail {

/// Whether `bytes` is one whole image of the plain kind (ITU-T T.81): baseline, 8 bits, grey or
/// YCbCr at 4:4:4, 4:2:2, 4:4:0 or 4:2:0, all in one scan that ends with the end marker and holds
/// no byte pair that no scan can hold. Damage that keeps to such pairs is not seen.
bool is_plain_baseline(const std::vector<uint8_t>& bytes);

}  // namespace ddp::detail
