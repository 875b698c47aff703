// SPDX-License-Identifier: Apache-2.0
// The sections of settings of the language examples.
#pragma once

#include <vector>

#include "ddp/core/fields.hpp"
#include "language/language_options.hpp"
#include "models/tokens/token_dataset.hpp"

namespace examples {

/// Section tokens of gpt2_ddp: one text as a stream, with the defaults of its sample.
struct StreamOptions : models::TokenDataOptions {
  StreamOptions();
};

/// Section tokens of bert_ddp: documents packed into rows.
struct MaskedTextOptions : models::TokenDataOptions {
  MaskedTextOptions();
};

/// Section tokens of lora_ddp.
struct ChatOptions : models::TokenDataOptions {
  ChatOptions();
};

/// The program's own sections, and the library's with the defaults of a run on the embedded sample.
/// Settings for images alone (data, train.label_smoothing, train.mixup, train.cutmix) are refused.
std::vector<ddp::Section> lora_sections();  ///< run, tokens, model, lora, decode
std::vector<ddp::Section> gpt2_sections();  ///< run, tokens, model, sample
std::vector<ddp::Section> bert_sections();  ///< tokens, masking, model

}  // namespace examples
