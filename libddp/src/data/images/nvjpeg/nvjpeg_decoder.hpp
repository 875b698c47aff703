// SPDX-License-Identifier: Apache-2.0
// Decodes batches of plain baseline JPEG images at full size on a GPU's JPEG engines.
#pragma once

#include <memory>

#include "data/images/region_decoder.hpp"

namespace ddp::detail {

#ifdef DDP_HAS_CUDA
/// A decoder that gives all other images, and those that nvJPEG refuses, to `cpu`. Without memory
/// on the GPU it gives all images to `cpu` from then on.
std::unique_ptr<RegionDecoder> make_nvjpeg_decoder(const RegionDecoderInputs& inputs,
                                                   std::unique_ptr<RegionDecoder> cpu);
#else
inline constexpr MakeRegionDecoder make_nvjpeg_decoder = nullptr;
#endif

}  // namespace ddp::detail
