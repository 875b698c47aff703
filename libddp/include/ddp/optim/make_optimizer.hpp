// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <memory>

#include "ddp/optim/optimizer.hpp"
#include "ddp/optim/optimizer_options.hpp"

namespace ddp {

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
/// parameter. After other code wrote the parameter, ops::overwritten() updates the master. The next
/// step detects new parameter memory (set_data, module->to and back) and updates the master. State
/// is saved as `state.<parameter name>.<slot>` with PyTorch's slots (momentum_buffer; exp_avg,
/// exp_avg_sq, max_exp_avg_sq, step) and `master`.
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
/// - After step() every `.grad` is undefined, as after zero_grad().
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

}  // namespace ddp
