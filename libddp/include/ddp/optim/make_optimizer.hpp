// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>

#include "ddp/optim/optimizer.hpp"
#include "ddp/optim/optimizer_options.hpp"

namespace ddp {

class DataParallelModel;

/// Anything with trainable parameters by name: ddp::DistributedDataParallel, a user's own wrapper.
template <typename Model>
concept HasNamedParameters = requires(const Model& model) {
  { model.named_parameters() } -> std::convertible_to<const NamedParameters&>;
};

/// SGD, Adam, AdamW, LARS or LAMB over `parameters`, capturable.
///
/// On CUDA one kernel updates all parameters (Adam: after a small one that counts; LARS and LAMB:
/// after those that take each parameter's norms): it reads the gradients where they lie, be it in a
/// reducer's buckets, in bfloat16, float16 or float32.
/// Elsewhere, for float64 parameters, parameters with holes in their memory, several devices and
/// SGD with dampening (OptimizerOptions::implementation), ATen's fused kernels do it: one call for
/// each (group, device, dtype); LARS and LAMB go there parameter by parameter. State is the same
/// for both, and either takes the other's.
///
/// A bfloat16 or float16 parameter gets a float32 master, made from the parameter when its first
/// gradient arrives: the rule runs on the master in float32, and the result is rounded into the
/// parameter. Where somebody else wrote it, ops::overwritten() makes the master follow; where it
/// was given other memory (set_data, module->to and back), the next step does by itself. State is
/// kept as `state.<parameter name>.<slot>` with PyTorch's slots (momentum_buffer; exp_avg,
/// exp_avg_sq, max_exp_avg_sq, step) and `master`.
///
/// SGD with dampening reads found_inf on the host until its first step was not skipped, because
/// that step is the one without dampening.
///
/// Throws SettingsError for settings out of range, a group whose patterns match nothing, two
/// parameters of one name, parameters that are not dense real floating-point tensors, and for
/// zero1, which needs the model.
AnyOptimizer make_optimizer(const NamedParameters& parameters, const OptimizerOptions& options);

/// For a data-parallel model, which must outlive the optimizer's last step.
///
/// With OptimizerOptions::zero1 the model's buckets are reduce-scattered, each rank keeps state
/// (masters and slots) of its part of every bucket alone, updates that part and gets the others'
/// updated weights: results are those without it, up to the order in which ranks are summed. Then
/// - after a backward `.grad` holds the mean in this rank's part only: clip by
///   clip_grad_norm_(model, …) or GradScaler::clip_and_step, not by a list of parameters;
/// - after step() every `.grad` is undefined, as after zero_grad();
/// - step(), scan_gradients() and state_dict() are collective. State is whole, on the host, under
///   parameter names: any world size loads it, with zero1 or without.
/// Throws SettingsError for LARS and LAMB, SGD with dampening, implementation=list, what the flat
/// implementation cannot take, models with a comm hook, and the second such optimizer of a model.
AnyOptimizer make_optimizer(DataParallelModel& model, const OptimizerOptions& options);

template <HasNamedParameters Model>
requires(!std::derived_from<Model, DataParallelModel>) AnyOptimizer
    make_optimizer(const Model& model, const OptimizerOptions& options) {
  return make_optimizer(model.named_parameters(), options);
}

}  // namespace ddp
