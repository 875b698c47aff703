// SPDX-License-Identifier: Apache-2.0
// The sections of settings that the language examples add to the library's.
#pragma once

#include <vector>

#include "ddp/core/settings.hpp"
#include "ddp/data/token_dataset.hpp"

namespace examples {

/// Section tokens of gpt2_ddp: a text as one stream; the other defaults are those of its sample.
struct StreamOptions : ddp::TokenDataOptions {
  StreamOptions();
};

/// Section tokens of lora_ddp.
struct ChatOptions : ddp::TokenDataOptions {
  ChatOptions();
};

/// Their own, and the library's sections with the defaults of a run on the embedded sample; without
/// those that only images have (data, train.label_smoothing, train.mixup), which are refused.
std::vector<ddp::Section> lora_sections();  ///< run, tokens, model, lora, decode
std::vector<ddp::Section> gpt2_sections();  ///< tokens, model, sample

}  // namespace examples
