// SPDX-License-Identifier: Apache-2.0
// Resizing on the CPU, as resample_taps.hpp says: columns first, then rows.
#pragma once

#include <cstdint>
#include <vector>

#include "data/image_view.hpp"
#include "data/resample_taps.hpp"

namespace ddp::detail {

/// Resizes to [rows.size, columns.size, 3] floats in 0..255 (memory is reused).
void resample(const ImageView& image, const ResampleAxis& columns, const ResampleAxis& rows,
              std::vector<float>& out);

/// The same in Pillow's arithmetic (Resample.c, ImagingResample with 8 bits a channel): weights in
/// fixed point, and bytes after either pass. Every byte is Pillow's.
void resample_bytes(const ImageView& image, const ResampleAxis& columns, const ResampleAxis& rows,
                    uint8_t* out);

}  // namespace ddp::detail
