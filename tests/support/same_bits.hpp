// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <cstring>

namespace testing {

/// Same dtype, shape and bits: NaN equals itself, -0 is not 0.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto x = a.contiguous();
  const auto y = b.contiguous();
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         (x.nbytes() == 0 ||  // empty tensors may have no pointer
          std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

}  // namespace testing
