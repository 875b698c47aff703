// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/rotary_embedding.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <stdexcept>
#include <vector>

#include "ddp/ops/autocast_off.hpp"

namespace ddp::ops {
namespace {

constexpr double kPi = 3.14159265358979323846;

/// Llama 3.1: wavelengths beyond original / low_freq_factor are stretched by `factor`, those below
/// original / high_freq_factor kept, and between them blended.
double llama3_frequency(double frequency, const RotaryOptions& o) {
  const double wavelength = 2 * kPi / frequency;
  const auto original = static_cast<double>(o.original_max_positions);
  if (wavelength > original / o.low_freq_factor) {
    return frequency / o.factor;
  }
  if (wavelength < original / o.high_freq_factor) {
    return frequency;
  }
  const double smooth =
      (original / wavelength - o.low_freq_factor) / (o.high_freq_factor - o.low_freq_factor);
  return (1 - smooth) * frequency / o.factor + smooth * frequency;
}

std::vector<float> inverse_frequencies(const RotaryOptions& o) {
  std::vector<float> frequencies;
  for (int64_t i = 0; i < o.head_dim; i += 2) {
    double frequency =
        1 / std::pow(o.theta, static_cast<double>(i) / static_cast<double>(o.head_dim));
    if (o.scaling == "linear") {
      frequency /= o.factor;
    } else if (o.scaling == "llama3") {
      frequency = llama3_frequency(frequency, o);
    } else if (o.scaling != "none") {
      throw std::invalid_argument("rotary embedding: scaling \"" + o.scaling +
                                  "\" is not one of none, linear, llama3");
    }
    frequencies.push_back(static_cast<float>(frequency));
  }
  return frequencies;
}

/// [x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin]; `direction` -1 turns back.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                  double direction) {
  const int64_t half = x.size(-1) / 2;
  const auto x1 = x.narrow(-1, 0, half), x2 = x.narrow(-1, half, half);
  auto output = at::empty(x.sizes(), x.options());
  output.narrow(-1, 0, half).copy_((x1 * cos).addcmul_(x2, sin, -direction));
  output.narrow(-1, half, half).copy_((x2 * cos).addcmul_(x1, sin, direction));
  return output;
}

class ApplyRotary : public torch::autograd::Function<ApplyRotary> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& cos, const at::Tensor& sin) {
    ctx->save_for_backward({cos, sin});
    return rotate(x, cos, sin, 1);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const AutocastOff no_autocast(saved[0].device().type());
    return {rotate(grad_outputs[0], saved[0], saved[1], -1), {}, {}};
  }
};

}  // namespace

RotaryTables make_rotary_tables(const RotaryOptions& options, int64_t num_positions,
                                at::Device device) {
  // As transformers: angles are float32 products of float32 numbers.
  const auto frequencies = at::tensor(inverse_frequencies(options), at::kFloat);
  const auto positions = at::arange(num_positions, at::kFloat);
  const auto angles = at::outer(positions, frequencies);
  return {angles.cos().to(device), angles.sin().to(device)};
}

RotaryAngles rotary_angles(const RotaryTables& tables, const at::Tensor& positions) {
  const auto take = [&](const at::Tensor& table) {
    auto shape = positions.sizes().vec();
    shape.insert(shape.end(), {1, table.size(1)});
    return table.index_select(0, positions.reshape({-1})).view(shape);
  };
  return {take(tables.cos), take(tables.sin)};
}

at::Tensor apply_rotary(const at::Tensor& x, const RotaryAngles& angles) {
  return ApplyRotary::apply(x, angles.cos, angles.sin);
}

}  // namespace ddp::ops
