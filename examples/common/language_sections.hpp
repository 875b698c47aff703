// SPDX-License-Identifier: Apache-2.0
// The sections of settings that the language examples add to the library's.
#pragma once

#include <vector>

#include "ddp/core/settings.hpp"
#include "ddp/data/token_dataset.hpp"

namespace examples {

/// Section tokens of gpt2_ddp: a text as one stream.
struct StreamOptions : ddp::TokenDataOptions {
  StreamOptions();
};

std::vector<ddp::Section> lora_sections();  ///< run, model, lora, tokens, decode
std::vector<ddp::Section> gpt2_sections();  ///< model, tokens, sample

}  // namespace examples
