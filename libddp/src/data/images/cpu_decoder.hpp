// SPDX-License-Identifier: Apache-2.0
// Decodes on the loader's threads, by ImageDataset::read_region.
#pragma once

#include <memory>

#include "data/images/region_decoder.hpp"

namespace ddp::detail {

/// A decoder of all images that read_image_header() accepts.
std::unique_ptr<RegionDecoder> make_cpu_decoder(const RegionDecoderInputs& inputs);

}  // namespace ddp::detail
