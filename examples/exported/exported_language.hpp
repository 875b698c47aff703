// SPDX-License-Identifier: Apache-2.0
// Exported programs of token ids as models of the language trainer.
#pragma once

#include "exported/exported_settings.hpp"
#include "language/language_trainer.hpp"

namespace examples {

/// Wraps a program whose forward takes token ids [batch, length]. Its output are logits [batch,
/// length, vocabulary] for the next token. With model.loss=in_graph it also takes the labels, which
/// are already shifted (-100: none), and returns their mean loss. First evaluates rows of the sizes
/// of `data`. Throws SettingsError for another output or a length that the program refuses,
/// DataError if it lacks ids of the data's vocabulary (on a GPU only: logits). Collective.
WrappedLanguageModel wrap_exported(const ddp::Context& ctx, const ddp::Config& cfg,
                                   ddp::ExportedModule module, const ExportedSettings& settings,
                                   const TokenData& data);

}  // namespace examples
