// SPDX-License-Identifier: Apache-2.0
// Common to token files and vocabularies: opening, and the metadata that names the vocabulary.
#pragma once

#include <string>

#include "ddp/core/safetensors.hpp"
#include "models/tokens/token_dataset.hpp"

namespace models::detail {

inline constexpr const char* kTokenFileFormat = "ddp_tokens";
inline constexpr const char* kVocabularyFormat = "ddp_vocabulary";
/// The fix in messages about damaged token files or vocabularies.
inline constexpr const char* kTokenFileFix =
    "; fix: prepare it again with data/prepare_chat.py or data/prepare_text.py (data/README.md)";

[[noreturn]] void refuse_token_file(const std::string& path, const std::string& why);

/// Maps `path` and checks format and version. Throws DataError if load_safetensors throws
/// ReadError.
ddp::Safetensors open_token_safetensors(const std::string& path, const std::string& format);

TokenizerInfo read_tokenizer_info(const ddp::Safetensors& file, const std::string& path);

/// The one-dimensional tensor `name`. Throws DataError if missing or of other dimensions.
at::Tensor take_vector(const ddp::Safetensors& file, const std::string& name,
                       const std::string& path);

/// Throws DataError unless `offsets` (I64) begins with 0, ends with `total` and ascends;
/// `strictly`: no empty parts. `part` is the word for a part in messages. Returns the number of
/// parts.
int64_t check_offsets(const at::Tensor& offsets, int64_t total, bool strictly,
                      const std::string& name, const std::string& part, const std::string& path);

}  // namespace models::detail
