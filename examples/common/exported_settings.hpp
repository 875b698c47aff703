// SPDX-License-Identifier: Apache-2.0
// The sections of exported_ddp, and the module that they describe.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/sample_loss.hpp"
#include "common/tensor_files.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/fields.hpp"
#include "ddp/export/exported_module.hpp"
#include "ddp/train/config.hpp"
#include "models/tokens/token_dataset.hpp"

namespace examples {

struct ExportedSettings {
  std::string path = "";
  std::vector<std::string> libraries = {}, checkpoint_blocks = {};
  LossKind loss = LossKind::CrossEntropy;
  std::string output = "";
  std::optional<c10::ScalarType> dtype = std::nullopt;  ///< nullopt: the archive's
  std::string weights = "";
  std::string save_weights = "";
  double ema_decay = 0;
};
void describe_fields(ExportedSettings& settings, ddp::FieldVisitor& visitor);

/// Section tokens: rows without padding by default, because an exported program has no mask.
struct ExportedTokens : models::TokenDataOptions {
  ExportedTokens();
};

/// The sections that exported_ddp adds: model, tokens, tensors, lora.
std::vector<ddp::Section> exported_sections();

enum class ExportedData { Images, Tokens, Tensors };
/// The kind of data that the settings name. Throws SettingsError for two kinds, and for settings
/// that have no meaning with the kind or the loss.
ExportedData choose_data(const ddp::Config& cfg, const ExportedSettings& model,
                         const ExportedTokens& tokens, const TensorFiles& tensors);

/// Reads the archive, on the communicator's device, in training mode, ready to be wrapped. Rank 0
/// loads model.weights; wrapping broadcasts them. Throws SettingsError if the archive lacks a mode
/// that the run needs.
ddp::ExportedModule make_exported(const ExportedSettings& settings, const ddp::Config& cfg,
                                  const ddp::CommunicatorPtr& communicator);

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
