// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace models {

/// The text of each id of a Hugging Face tokenizer.
struct HfVocabulary {
  std::string path;                  ///< file that the entries come from
  std::vector<std::string> entries;  ///< bytes by id; empty: no such id
};

/// Reads `folder`/tokenizer.json, or vocab.json (of GPT-2's first releases) if there is no
/// tokenizer.json. Tokens become bytes as in the prepare scripts (data/text_tokenizers.py):
/// byte-level tokens by GPT-2's table of characters, SentencePiece tokens with U+2581 for a space
/// and <0x0A> for a byte. WordPiece tokens ("##ing" continues a word) and added tokens are
/// unchanged. Returns nullopt if the folder has neither file or its tokenizer is of another style.
/// Throws ddp::ReadError naming file and key if the file is damaged.
std::optional<HfVocabulary> read_hf_vocabulary(const std::string& folder);

}  // namespace models
