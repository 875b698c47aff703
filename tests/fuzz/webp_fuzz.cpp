// SPDX-License-Identifier: Apache-2.0
// A WebP image.
#include "fuzz/image_case.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  fuzz::decode_region_alone({data, data + size});
  return 0;
}
