// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "models/tokens/token_dataset.hpp"

namespace models::detail {

/// One split, memory-mapped. Any number of threads may read it. Documents are not empty.
class TokenFile {
 public:
  /// Checks the file's structure and the ids of the first 2^26 tokens; later ids are checked when
  /// read. Throws DataError naming the file; for an id outside the vocabulary also its place.
  explicit TokenFile(const std::string& path);

  const std::string& path() const { return path_; }
  const std::string& name() const { return name_; }  ///< of the text, for logs
  const TokenizerInfo& tokenizer() const { return tokenizer_; }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_documents() const { return num_documents_; }

  int64_t document_begin(int64_t document) const { return documents_[document]; }
  int64_t document_length(int64_t document) const {
    return documents_[document + 1] - documents_[document];
  }
  int64_t document_of(int64_t token) const;

  /// Ids of `count` tokens from `begin`. Throws DataError as the constructor does.
  void copy_tokens(int64_t begin, int64_t count, int32_t* out) const;

  /// Whether the file marks the targets of the loss; else all tokens are targets.
  bool has_targets() const { return targets_ != nullptr; }
  bool is_target(int64_t token) const { return targets_ == nullptr || targets_[token] != 0; }
  int64_t count_targets(int64_t begin, int64_t count) const;

  /// The document's spans of targets (the answers of a chat) in order, each with all tokens before
  /// it, except a span at the document's start. A file without targets has no spans.
  std::vector<PromptReference> prompt_references(int64_t document) const;

 private:
  void check_ids(int64_t begin, int64_t count) const;
  [[noreturn]] void fail_id(int64_t token, int64_t id) const;

  std::string path_;
  std::string name_;
  TokenizerInfo tokenizer_;
  at::Tensor tokens_tensor_;  // these own the mapping
  at::Tensor documents_tensor_;
  at::Tensor targets_tensor_;
  const uint16_t* tokens16_ = nullptr;  // exactly one of these is set
  const int32_t* tokens32_ = nullptr;
  const int64_t* documents_ = nullptr;
  const uint8_t* targets_ = nullptr;
  int64_t num_tokens_ = 0;
  int64_t num_documents_ = 0;
  int64_t num_checked_ = 0;  // tokens from the start whose ids are checked
};

/// Throws DataError naming both files unless `file` was made with this vocabulary.
void require_same_vocabulary(const Vocabulary& vocabulary, const TokenFile& file);

}  // namespace models::detail
