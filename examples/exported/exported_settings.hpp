// SPDX-License-Identifier: Apache-2.0
// The sections of exported_ddp, and the module that they describe.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/sample_loss.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/fields.hpp"
#include "ddp/export/exported_module.hpp"
#include "ddp/train/config.hpp"
#include "models/tokens/token_dataset.hpp"
#include "tensors/tensor_files.hpp"

namespace examples {

struct ExportedSettings {
  std::string path = "";
  std::vector<std::string> libraries = {}, checkpoint_blocks = {};
  LossKind loss = LossKind::CrossEntropy;
  std::string output = "";
  std::optional<c10::ScalarType> dtype = std::nullopt;  ///< nullopt: the archive's
  std::string weights = "";
  std::string save_weights = "";
  bool sync_batch_norm = false;
  double ema_decay = 0;
  bool fuse = true;
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

}  // namespace examples
