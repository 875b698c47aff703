// SPDX-License-Identifier: Apache-2.0
// Exported programs of token ids as models of the language trainer.
#pragma once

#include "common/exported_settings.hpp"
#include "common/language_trainer.hpp"

namespace examples {

/// Wraps a program whose forward takes token ids [batch, length]. Its output are logits [batch,
/// length, vocabulary] for the next token. With model.loss=in_graph it also takes the labels, which
/// are already shifted (-100: none), and returns their mean loss. Throws SettingsError for another
/// output, DataError for fewer logits than the data's vocabulary. Collective.
WrappedLanguageModel wrap_exported(const ddp::Context& ctx, const ddp::Config& cfg,
                                   const ExportedNet& module, const ExportedSettings& settings,
                                   int64_t vocab_size);

}  // namespace examples
