// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "unit/export/fused_network.hpp"

namespace export_test {

/// How a network writes squeeze and excitation. The default is torchvision's.
struct GateForm {
  bool by_mean = false;     // mean.dim in place of adaptive_avg_pool2d
  bool scale_first = true;  // of the product
  std::string gate = "sigmoid.default";
  std::string activation = "silu_.default";  // that makes x
};

inline GateForm timm_gate() {
  return {.by_mean = true, .scale_first = false};
}

inline std::string global_pool(Network& net, const std::string& x, bool by_mean = false) {
  return by_mean
             ? net.call("mean.dim",
                        {{"self", tensor(x)}, {"dim", integers({2, 3})}, {"keepdim", truth(true)}})
             : net.call("adaptive_avg_pool2d.default",
                        {{"self", tensor(x)}, {"output_size", integers({1, 1})}});
}

/// The scale that is computed from the means.
inline std::string gate_of(Network& net, const std::string& means,
                           const std::string& gate = "sigmoid.default") {
  return net.unary(gate, net.conv(net.relu(net.conv(means, 1)), 1));
}

inline std::string product_of(Network& net, const std::string& scale, const std::string& x,
                              bool scale_first = true) {
  return scale_first ? net.multiply(scale, x) : net.multiply(x, scale);
}

/// Two blocks of EfficientNet, with a residual around the second.
inline Network gated_network(const GateForm& form = {}, int64_t channels = 4,
                             at::ScalarType type = at::kFloat) {
  Network net({channels, 8, 8}, type);
  std::string y = "x";
  for (int block = 0; block < 2; ++block) {
    const auto x = net.unary(form.activation, net.norm(net.conv(y, 3)));
    const auto scale = gate_of(net, global_pool(net, x, form.by_mean), form.gate);
    const auto z = net.norm(net.conv(product_of(net, scale, x, form.scale_first), 1));
    y = block == 0 ? z : net.add(z, y, /*in_place=*/true);
  }
  net.returns(y);
  return net;
}

}  // namespace export_test
