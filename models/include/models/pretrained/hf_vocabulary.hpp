// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace models {

/// What the ids of a Hugging Face tokenizer stand for.
struct HfVocabulary {
  std::string path;                  ///< of the file that says so
  std::vector<std::string> entries;  ///< bytes by id; empty: there is no such id
};

/// Reads `folder`/tokenizer.json, or where there is none vocab.json (of GPT-2's first releases).
/// Tokens become bytes as data/prepare_chat.py has them: byte-level ones by GPT-2's table of
/// characters, SentencePiece's with U+2581 for a space and <0x0A> for a byte, added ones as they
/// are. Nothing where the folder has neither file, or its tokenizer is of another style. Throws
/// ddp::ReadError naming file and key where the file is damaged.
std::optional<HfVocabulary> read_hf_vocabulary(const std::string& folder);

}  // namespace models
