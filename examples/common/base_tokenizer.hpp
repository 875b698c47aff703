// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "common/language_options.hpp"
#include "ddp/data/token_dataset.hpp"

namespace examples {

/// What is wrong with token files as the text of a pretrained model.
struct TokenizerComparison {
  std::string refusal;  ///< ids mean other text: empty where not
  std::string warning;  ///< they may; or it cannot be told
};

/// Compares what the ids of `data` stand for (its vocabulary.safetensors) with the tokenizer in the
/// Hugging Face folder `base`. Special tokens that differ, and ids that the base's tokenizer lacks,
/// are a warning: such are added on purpose. Throws what models::read_hf_vocabulary() throws.
TokenizerComparison compare_tokenizers(const ddp::TokenDataset& data, const std::string& base);

/// On one rank, before a pretrained model is read: logs the warning, throws the refusal as
/// DataError.
void require_base_tokenizer(const ddp::TokenDataset& data, const LanguageModelSettings& model);

}  // namespace examples
