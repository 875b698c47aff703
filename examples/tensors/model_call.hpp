// SPDX-License-Identifier: Apache-2.0
// Calls of models whose output and loss are settings (model.output, model.loss).
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>

#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/export/exported_module.hpp"
#include "ddp/train/config.hpp"

namespace examples {

/// The error of a program that lacks its target, with the setting that gives it one.
ddp::SettingsError with_target_hint(const ddp::MissingArgumentError& error);

/// Calls `check` with the sizes of this rank's training batches, so that a program that refuses the
/// last one of an epoch does so before the training. The SettingsError then names the size. Does
/// nothing with loader.global_batch_size.
void check_training_batches(const ddp::Context& ctx, const ddp::Config& cfg, int64_t num_samples,
                            const std::function<void(int64_t size)>& check);

/// `input` in the dtype of the parameters, if it has floating-point numbers.
at::Tensor as_input(const at::Tensor& input, c10::ScalarType parameter_dtype);

/// The output that model.output names: of one tensor that tensor, else the first or the named one.
/// Throws SettingsError if there is no such tensor.
at::Tensor select_output(const c10::IValue& outputs, const std::string& name);

/// The loss that the program returned; without a name that of the key "loss", if any. Throws
/// SettingsError if it is no scalar.
at::Tensor loss_in_graph(const c10::IValue& outputs, const std::string& name);

/// The images' class scores. Throws SettingsError for another shape than [images, classes],
/// DataError for fewer than `num_classes` classes.
at::Tensor class_scores(const c10::IValue& outputs, const std::string& name, int64_t num_classes);

}  // namespace examples
