// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding (Su et al., arXiv:2104.09864) in the layout of Hugging Face's Llama and
// Qwen2: element i of a head is rotated with element i + head_dim / 2.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace ddp::ops {

struct RotaryOptions {
  int64_t head_dim = 128;
  double theta = 10000;  ///< base of the wavelengths
  /// none; linear: positions / factor; llama3: long wavelengths / factor, blended between
  /// low_freq_factor and high_freq_factor of original_max_positions
  std::string scaling = "none";
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_max_positions = 8192;
};

/// Cosines and sines by position, float32 [positions, head_dim / 2] each.
struct RotaryTables {
  at::Tensor cos;
  at::Tensor sin;
};
RotaryTables make_rotary_tables(const RotaryOptions& options, int64_t num_positions,
                                at::Device device);

/// Angles of `positions` int64 [..., seq]: float32 [..., seq, 1, head_dim / 2]. Computed once for
/// all layers.
struct RotaryAngles {
  at::Tensor cos;
  at::Tensor sin;
};
RotaryAngles rotary_angles(const RotaryTables& tables, const at::Tensor& positions);

/// Rotates x [..., seq, heads, head_dim] by `angles`; computes in float32, returns x's dtype.
at::Tensor apply_rotary(const at::Tensor& x, const RotaryAngles& angles);

}  // namespace ddp::ops
