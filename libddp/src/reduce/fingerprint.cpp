// SPDX-License-Identifier: Apache-2.0
#include "ddp/core/state_dict.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "ddp/core/error.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ddp {
namespace {

constexpr int64_t kPieceBytes = int64_t{64} << 20;

void add_values(XXH3_state_t& hash, const at::Tensor& tensor) {
  const auto flat = tensor.detach().contiguous().view({-1});
  const int64_t piece = std::max<int64_t>(1, kPieceBytes / flat.element_size());
  for (int64_t begin = 0; begin < flat.numel(); begin += piece) {
    const auto values = flat.narrow(0, begin, std::min(piece, flat.numel() - begin)).cpu();
    XXH3_64bits_update(&hash, values.const_data_ptr(), values.nbytes());
  }
}

}  // namespace

std::string fingerprint_of(const NamedParameters& parameters) {
  const at::NoGradGuard no_grad;
  XXH3_state_t hash;
  XXH3_64bits_reset(&hash);
  for (const auto& [name, tensor] : parameters) {
    const auto about =
        concat(name, ' ', at::toString(tensor.scalar_type()), ' ', tensor.sizes(), '\n');
    XXH3_64bits_update(&hash, about.data(), about.size());
    add_values(hash, tensor);
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx",
                static_cast<unsigned long long>(XXH3_64bits_digest(&hash)));
  return text;
}

}  // namespace ddp
