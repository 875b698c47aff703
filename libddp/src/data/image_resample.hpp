// SPDX-License-Identifier: Apache-2.0
// Resizing on the CPU with the taps of resample_taps.hpp: columns first, then rows.
#pragma once

#include <cstdint>
#include <vector>

#include "data/jpeg.hpp"
#include "data/resample_taps.hpp"

namespace ddp::detail {

/// Resizes to [rows.size, columns.size, 3] floats in 0..255 (memory is reused).
void resample(const ImageView& image, const ResampleAxis& columns, const ResampleAxis& rows,
              std::vector<float>& out);

/// Same in Pillow's arithmetic (Resample.c, ImagingResample with 8 bits per channel): fixed-point
/// weights, bytes after either pass. Every byte equals Pillow's.
void resample_bytes(const ImageView& image, const ResampleAxis& columns, const ResampleAxis& rows,
                    uint8_t* out);

}  // namespace ddp::detail
