// SPDX-License-Identifier: Apache-2.0
// Sections of settings that the language examples add to the library's.
#pragma once

#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/data/token_dataset.hpp"

namespace examples {

/// Section tokens of gpt2_ddp: one text as a stream, with the defaults of its sample.
struct StreamOptions : ddp::TokenDataOptions {
  StreamOptions();
};

/// Section tokens of lora_ddp.
struct ChatOptions : ddp::TokenDataOptions {
  ChatOptions();
};

/// The program's own sections, and the library's with the defaults of a run on the embedded sample.
/// Settings for images alone (data, train.label_smoothing, train.mixup) are refused.
std::vector<ddp::Section> lora_sections();  ///< run, tokens, model, lora, decode
std::vector<ddp::Section> gpt2_sections();  ///< tokens, model, sample

}  // namespace examples
