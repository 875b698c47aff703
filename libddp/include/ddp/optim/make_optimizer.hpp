// SPDX-License-Identifier: Apache-2.0
// Makes optimizers from their settings, and clips gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/detail/usage_mark.hpp"
#include "ddp/optim/optimizer.hpp"

namespace torch::optim {
class Optimizer;
}

namespace ddp {

enum class OptimizerType { Sgd, Adam, AdamW, Lars, Lamb, Muon };

/// How an optimizer is computed. Results agree within a few ulp, and the state is the same.
enum class OptimizerImplementation {
  Auto,  ///< Flat on CUDA if supported, else List
  Flat,  ///< one kernel for all parameters; reads gradients in place, in their own dtype
  List   ///< ATen's fused kernels over lists of tensors
};

/// Factor of the learning rate for a matrix of `rows` x `cols`, of which Muon's update has singular
/// values of about 1.
enum class MuonScale {
  MatchRmsAdamW,  ///< 0.2 sqrt(max(rows, cols)): AdamW's learning rates fit (arXiv:2502.16982)
  Original        ///< sqrt(max(1, rows / cols)), Keller Jordan's
};

/// Settings of OptimizerType::Muon (docs/muon.md).
struct MuonOptions {
  double momentum = 0.95;                      ///< of the running mean of gradients
  bool nesterov = true;                        ///< the update looks one gradient ahead
  int64_t ns_steps = 5;                        ///< Newton-Schulz steps per update
  MuonScale scale = MuonScale::MatchRmsAdamW;  ///< factor of the learning rate
  /// Shell patterns of names that AdamW updates although they have two or more dimensions.
  std::vector<std::string> adamw_parameters = first_and_last_layers();

  /// Names of libddp's, torchvision's, timm's and transformers' models, embeddings among them.
  static std::vector<std::string> first_and_last_layers();
};
void describe_fields(MuonOptions& options, FieldVisitor& visitor);

/// A parameter belongs to the first group with a matching pattern.
struct ParameterGroup {
  /// Shell patterns (`*`, `?`, `[…]`) that match whole parameter names: "fc.*", "*.bias".
  std::vector<std::string> patterns{};
  double lr_scale = 1.0;                 ///< factor of the step's learning rate; 0: does not move
  std::optional<double> weight_decay{};  ///< replaces OptimizerOptions::weight_decay
};

/// SGD, Adam and AdamW use the formulas of torch.optim with the same settings. LARS and LAMB use
/// those of docs/semantics_training.md, "LARS and LAMB". Muon updates matrices, and AdamW all other
/// parameters, as docs/muon.md describes.
struct OptimizerOptions {
  OptimizerType type = OptimizerType::Sgd;
  double weight_decay = 0.0;         ///< SGD, Adam: added to the gradient; AdamW, Muon: decoupled
  bool decay_norm_and_bias = true;   ///< false: no weight decay on parameters with one dimension
  double momentum = 0.0;             ///< SGD, LARS
  double dampening = 0.0;            ///< SGD
  bool nesterov = false;             ///< SGD; needs momentum > 0 and dampening = 0
  double beta1 = 0.9;                ///< Adam, AdamW, LAMB, Muon's AdamW
  double beta2 = 0.999;              ///< Adam, AdamW, LAMB, Muon's AdamW
  double eps = 1e-8;                 ///< Adam, AdamW, LARS, LAMB, Muon's AdamW
  bool amsgrad = false;              ///< Adam, AdamW, Muon's AdamW
  double trust_coefficient = 0.001;  ///< LARS
  bool adapt_norm_and_bias = false;  ///< LARS, LAMB: parameters with one dimension have a ratio too
  MuonOptions muon{};                ///< Muon
  OptimizerImplementation implementation = OptimizerImplementation::Auto;
  bool zero1 = false;  ///< ZeRO-1 (Rajbhandari et al., arXiv:1910.02054); see make_optimizer
  /// In a settings file each group is a text: "PATTERN[,PATTERN…] lr_scale=0.1 weight_decay=0". On
  /// the command line "a.*,b.* lr_scale=0.1" is split at the comma. A part without a setting
  /// ("a.*") is joined to the next part.
  std::vector<ParameterGroup> groups{};
  detail::UsageMark usage{};  ///< not a setting: set when a library object receives these options
};
void describe_fields(OptimizerOptions& options, FieldVisitor& visitor);

class DataParallelModel;

/// Makes a capturable optimizer over `parameters`. On CUDA OptimizerImplementation::Auto is Flat,
/// but List for float64 parameters, parameters with holes in their memory, several devices, and SGD
/// with dampening (which reads found_inf on the host until the first step that is not skipped).
///
/// A bfloat16 or float16 parameter gets a float32 master, made from the parameter when its first
/// gradient arrives (docs/semantics_training.md, "Optimizers"). Other code may write the parameter
/// or replace its memory (set_data, module->to and back) at any time. After its first step, a
/// parameter of another shape, dtype, device or memory order is a SettingsError. Loading state
/// changes no parameter, so load the model's state too. State is saved as
/// `state.<parameter name>.<slot>` with PyTorch's slots and `master`.
///
/// Throws SettingsError for settings out of range, a group whose patterns match nothing, duplicate
/// names, parameters that are not dense real floating-point tensors, zero1, and Muon without a
/// matrix to update.
std::unique_ptr<Optimizer> make_optimizer(const NamedParameters& parameters,
                                          const OptimizerOptions& options);

/// For a data-parallel model, which must outlive the optimizer's last step. With
/// OptimizerOptions::zero1 each rank keeps and updates its part of every bucket, and `.grad` has
/// the contents that docs/semantics_training.md, "ZeRO-1", lists. step() and scan_gradients() are
/// then collective. state_dict() has this rank's parts.
/// With Muon and several ranks each rank keeps the momentum of its share of the matrices, updates
/// those and sends them. step() is then collective, and found_inf must be equal on all ranks.
/// state_dict() has this rank's matrices as parts. join(model, loop) throws SettingsError.
/// With zero1 throws SettingsError for LARS, LAMB, Muon, SGD with dampening, implementation=list,
/// models that Flat does not support, models with a comm hook, and a second such optimizer of a
/// model.
std::unique_ptr<Optimizer> make_optimizer(DataParallelModel& model,
                                          const OptimizerOptions& options);

/// Adapts a torch::optim::Optimizer, for GradScaler and Checkpointer. Not capturable; GradScaler
/// reads found_inf on the host before each step. `parameters` must name every parameter of the
/// optimizer (else SettingsError). Other entries, as in a model's list, are ignored. A step of
/// Adam, AdamW, RMSprop, or of SGD with momentum or weight decay, throws SettingsError for sparse
/// gradients.
///
/// A step with `lr` sets every group's learning rate to lr, times the ratio of the group's rate to
/// that of the first group with a rate above 0, both at construction. It throws SettingsError if
/// all were 0. step() without arguments uses the groups' rates. Groups added later are refused.
///
/// No step has a closure. An optimizer that needs one (LBFGS) stays unwrapped. Its closure zeroes
/// the gradients, runs the wrapped model's forward and the backward, and returns a loss that is
/// equal on all ranks (its mean over them), because the optimizer's decisions follow it.
/// State of SGD, Adam, AdamW, RMSprop and Adagrad has PyTorch's slot names. A Checkpointer with
/// checkpoint.dir refuses other optimizers with SettingsError when it is made.
std::unique_ptr<Optimizer> wrap_optimizer(std::shared_ptr<torch::optim::Optimizer> optimizer,
                                          const NamedParameters& parameters);

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_
/// does, but sums powers in float64. Returns the norm before clipping as a 0-dim tensor on the
/// first gradient's device (0 without gradients). The host does not wait. `max_norm` <= 0 only
/// measures. Throws SettingsError for gradients sharded by zero1: use the overload for a model.
at::Tensor clip_grad_norm_(const NamedParameters& parameters, double max_norm,
                           double norm_type = 2.0);
/// Collective with zero1, which also needs `norm_type` > 0. Throws as Optimizer::step() does for
/// gradients that no backward averaged.
at::Tensor clip_grad_norm_(const DataParallelModel& model, double max_norm, double norm_type = 2.0);

}  // namespace ddp
