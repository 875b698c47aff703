// SPDX-License-Identifier: Apache-2.0
// Settings of optimizers. The learning rate belongs to the schedule (optim/lr_schedule.hpp) and is
// an argument of every step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/core/taken_mark.hpp"

namespace ddp {

enum class OptimizerType { Sgd, Adam, AdamW, Lars, Lamb };

/// How an optimizer is computed; results and state do not depend on it.
enum class OptimizerImplementation {
  Auto,  ///< Flat on CUDA if supported, else List
  Flat,  ///< one pass over all parameters; reads gradients in place, in their own dtype
  List   ///< ATen's fused kernels over lists of tensors
};

/// Parameters with their own settings. A parameter belongs to the first group with a matching
/// pattern.
struct ParameterGroup {
  /// Shell patterns (`*`, `?`, `[…]`) that match whole parameter names: "fc.*", "*.bias".
  std::vector<std::string> patterns{};
  double lr_scale = 1.0;                 ///< factor of the step's learning rate
  std::optional<double> weight_decay{};  ///< replaces OptimizerOptions::weight_decay
};

/// SGD, Adam and AdamW use the formulas of torch.optim with the same settings. Below: a parameter w
/// with gradient g, weight decay d and learning rate lr (after its group's lr_scale).
///
/// LARS (You, Gitman, Ginsburg, arXiv:1708.03888, algorithm 1; as in MLPerf Training's references):
///     ratio = trust_coefficient * |w| / (|g| + d * |w| + eps)
///     m     = momentum * m + lr * ratio * (g + d * w)
///     w     = w - m
/// LAMB (You et al., arXiv:1904.00962, algorithm 2 with phi(x) = x and Adam's bias corrections;
/// gradients are not divided by their norm: clip them, as NVIDIA's BERT does):
///     m     = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
///     u     = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + d * w
///     ratio = |w| / |u|
///     w     = w - lr * ratio * u
/// Norms are 2-norms over the whole parameter. The ratio is 1 if a norm is 0, and for parameters
/// with one dimension (biases, norms) unless adapt_norm_and_bias.
struct OptimizerOptions {
  OptimizerType type = OptimizerType::Sgd;
  double weight_decay = 0.0;         ///< SGD, Adam: added to the gradient; AdamW: decoupled
  bool decay_norm_and_bias = true;   ///< false: no weight decay on parameters with one dimension
  double momentum = 0.0;             ///< SGD, LARS
  double dampening = 0.0;            ///< SGD
  bool nesterov = false;             ///< SGD; needs momentum > 0 and dampening = 0
  double beta1 = 0.9;                ///< Adam, AdamW, LAMB
  double beta2 = 0.999;              ///< Adam, AdamW, LAMB
  double eps = 1e-8;                 ///< Adam, AdamW, LARS, LAMB
  bool amsgrad = false;              ///< Adam, AdamW
  double trust_coefficient = 0.001;  ///< LARS
  bool adapt_norm_and_bias = false;  ///< LARS, LAMB: parameters with one dimension have a ratio too
  OptimizerImplementation implementation = OptimizerImplementation::Auto;
  /// ZeRO-1 (Rajbhandari et al., arXiv:1910.02054, stage 1); see make_optimizer. Not for LARS,
  /// LAMB.
  bool zero1 = false;
  /// In a settings file each group is a text: "PATTERN[,PATTERN…] lr_scale=0.1 weight_decay=0".
  /// Overrides are split at every comma, so an item without a setting belongs to the next group.
  std::vector<ParameterGroup> groups{};
  detail::TakenMark taken{};  ///< not a setting: reports to ddp::Config that these options are used
};
void describe_fields(OptimizerOptions& options, FieldVisitor& visitor);

/// Throws SettingsError naming the first setting that is out of range or contradicts another.
void validate(const OptimizerOptions& options);

}  // namespace ddp
