// SPDX-License-Identifier: Apache-2.0
// Makes optimizers from their settings, and clips gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/detail/taken_mark.hpp"
#include "ddp/optim/optimizer.hpp"

namespace ddp {

enum class OptimizerType { Sgd, Adam, AdamW, Lars, Lamb };

/// How an optimizer is computed; results and state do not depend on it.
enum class OptimizerImplementation {
  Auto,  ///< Flat on CUDA if supported, else List
  Flat,  ///< one pass over all parameters; reads gradients in place, in their own dtype
  List   ///< ATen's fused kernels over lists of tensors
};

/// Own settings of parameters. A parameter belongs to the first group with a matching pattern.
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

class DataParallelModel;

/// Any type with named trainable parameters: ddp::DistributedDataParallel, a user's own wrapper.
template <typename Model>
concept HasNamedParameters = requires(const Model& model) {
  { model.named_parameters() } -> std::convertible_to<const NamedParameters&>;
};

/// Makes SGD, Adam, AdamW, LARS or LAMB over `parameters`. The optimizer is capturable.
///
/// The flat implementation (default on CUDA) updates all parameters in one kernel. It reads
/// gradients in place, also from a reducer's buckets, in bfloat16, float16 or float32. Adam runs a
/// small counting kernel first; LARS and LAMB first run kernels for each parameter's norms.
///
/// The list implementation (OptimizerOptions::implementation) is the default elsewhere. It is also
/// used for float64 parameters, parameters with holes in their memory, several devices and SGD with
/// dampening. It calls ATen's fused kernels once per (group, device, dtype); LARS and LAMB run
/// parameter by parameter. Each implementation loads the other's state.
///
/// A bfloat16 or float16 parameter gets a float32 master, made from the parameter when its first
/// gradient arrives. The rule runs on the master in float32, and the result is rounded into the
/// parameter. Other code may write the parameter or replace its memory (set_data, module->to and
/// back) at any time, also between replays of a captured step: where the master does not round to
/// the parameter, the next update starts from the parameter. Loading state changes no parameter,
/// so load the model's state too. State is saved as `state.<parameter name>.<slot>` with PyTorch's
/// slots (momentum_buffer; exp_avg, exp_avg_sq, max_exp_avg_sq, step) and `master`.
///
/// SGD with dampening reads found_inf on the host until one step was not skipped, because its first
/// step runs without dampening.
///
/// Throws SettingsError for settings out of range, a group whose patterns match nothing, duplicate
/// parameter names, parameters that are not dense real floating-point tensors, and zero1, which
/// needs the model.
std::unique_ptr<Optimizer> make_optimizer(const NamedParameters& parameters,
                                          const OptimizerOptions& options);

/// For a data-parallel model, which must outlive the optimizer's last step.
///
/// With OptimizerOptions::zero1 the model's buckets are reduce-scattered. Each rank keeps the state
/// (masters and slots) of its part of every bucket, updates that part and gathers the updated
/// weights of the others. Results equal those without zero1, up to the order in which ranks are
/// summed. With zero1:
/// - After a backward, `.grad` holds the mean in this rank's part only. Clip with
///   clip_grad_norm_(model, …) or GradScaler::clip_and_step, not with a list of parameters.
/// - After step() every `.grad` is undefined, as after zero_grad(). So is a part of the mean once
///   the model is gone.
/// - step(), scan_gradients() and state_dict() are collective. state_dict() is complete, on the
///   host, under parameter names: any world size loads it, with zero1 or without.
/// Throws SettingsError for LARS and LAMB, SGD with dampening, implementation=list, models that the
/// flat implementation does not support, models with a comm hook, and a second such optimizer of a
/// model.
std::unique_ptr<Optimizer> make_optimizer(DataParallelModel& model,
                                          const OptimizerOptions& options);

template <HasNamedParameters Model>
requires(!std::derived_from<Model, DataParallelModel>) std::unique_ptr<Optimizer> make_optimizer(
    const Model& model, const OptimizerOptions& options) {
  return make_optimizer(model.named_parameters(), options);
}

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_
/// does. norm is the `norm_type`-norm of all gradients as one vector. Undefined gradients are
/// skipped. Powers are summed in float64, so finite gradients of any size are limited.
///
/// Throws SettingsError for gradients sharded over the ranks (OptimizerOptions::zero1): use the
/// overload for a model.
///
/// Returns the norm before clipping as a 0-dim tensor on the first gradient's device (0 without
/// gradients). The host does not wait. `max_norm` <= 0 only measures.
at::Tensor clip_grad_norm_(const NamedParameters& parameters, double max_norm,
                           double norm_type = 2.0);

namespace detail {
at::Tensor clip_gradients_of(const DataParallelModel& model, double max_norm, double norm_type);
}

/// The same for a model. Collective for a data-parallel model with sharded gradients
/// (OptimizerOptions::zero1); `norm_type` must then be more than 0.
template <HasNamedParameters Model>
at::Tensor clip_grad_norm_(const Model& model, double max_norm, double norm_type = 2.0) {
  if constexpr (std::derived_from<Model, DataParallelModel>) {
    return detail::clip_gradients_of(model, max_norm, norm_type);
  } else {
    return clip_grad_norm_(model.named_parameters(), max_norm, norm_type);
  }
}

}  // namespace ddp
