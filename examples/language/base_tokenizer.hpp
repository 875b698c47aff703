// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "language/language_options.hpp"
#include "models/tokens/token_dataset.hpp"

namespace examples {

/// Differences between the token files and the tokenizer of a pretrained model.
struct TokenizerComparison {
  std::string refusal;  ///< ids stand for other text; empty if not
  std::string warning;  ///< ids may stand for other text, or the check is impossible
};

/// Compares the entries of `data` (its vocabulary.safetensors) with the tokenizer in the Hugging
/// Face folder `base`. Different special tokens, and ids that the base's tokenizer lacks, only give
/// a warning, because such tokens are added on purpose. Throws what models::read_hf_vocabulary()
/// throws.
TokenizerComparison compare_tokenizers(const models::TokenDataset& data, const std::string& base);

/// Call it on one rank, before a pretrained model is read. Logs the warning, throws the refusal as
/// DataError.
void require_base_tokenizer(const models::TokenDataset& data, const LanguageModelSettings& model);

}  // namespace examples
