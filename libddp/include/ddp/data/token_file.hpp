// SPDX-License-Identifier: Apache-2.0
// Memory-mapped token files and their vocabulary, prepared once by data/prepare_chat.py or
// data/prepare_text.py. data/README.md describes the format.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ddp {

/// A file's description of the vocabulary of its ids.
struct TokenizerInfo {
  int64_t vocab_size = 0;    ///< ids are 0 .. vocab_size - 1
  std::string identity;      ///< hash over the vocabulary's entries; equal hashes mean equal ids
  std::string name;          ///< for people
  int64_t end_of_text = -1;  ///< the id that ends a document; -1: none
  int64_t end_of_turn = -1;  ///< the id that ends a turn of a chat; -1: none
  /// The ids that stop decoding: end_of_text and end_of_turn, if present.
  std::vector<int64_t> end_tokens() const;
};

/// A prompt and its reference answer, including the answer's last id (an end of turn). The prompt
/// contains the reference's earlier answers of the same document.
struct PromptReference {
  int64_t document = 0;
  int64_t answer = 0;  ///< number in the document, from 0
  std::vector<int64_t> prompt;
  std::vector<int64_t> reference;
};

/// One split. Any number of threads may read it. Documents are contiguous and not empty.
class TokenFile {
 public:
  /// Maps `path` and checks its whole structure and the ids of the first 2^26 tokens (at about 4
  /// GB/s). Later ids are checked when read. Throws DataError naming the file; for an id outside
  /// the vocabulary also the document and the position in it.
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
  /// The document that holds a token.
  int64_t document_of(int64_t token) const;

  /// Ids of `count` tokens from `begin`. Throws DataError as the constructor does.
  void copy_tokens(int64_t begin, int64_t count, int32_t* out) const;

  /// Whether the file marks the targets of the loss. Without marks all tokens are targets.
  bool has_targets() const { return targets_ != nullptr; }
  bool is_target(int64_t token) const { return targets_ == nullptr || targets_[token] != 0; }
  int64_t count_targets(int64_t begin, int64_t count) const;

  /// The document's spans of targets (the answers of a chat) in order, each with all tokens before
  /// it. A span at the document's start answers nothing and is skipped. A file without targets has
  /// no spans.
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

/// The bytes of each id: turns ids back into text without a tokenizer.
class Vocabulary {
 public:
  /// Reads `vocabulary.safetensors`. Throws DataError naming the file.
  explicit Vocabulary(const std::string& path);

  const std::string& path() const { return path_; }
  const TokenizerInfo& tokenizer() const { return tokenizer_; }
  int64_t size() const { return tokenizer_.vocab_size; }

  /// Returns U+FFFD for an id beyond the vocabulary (possible with a model's padded head).
  std::string_view bytes(int64_t id) const;
  /// Whether the id is structure, not text, such as <|im_end|>.
  bool is_special(int64_t id) const;
  /// The smallest id with exactly these bytes.
  std::optional<int64_t> find(std::string_view bytes) const;

  /// The text of `ids`, optionally without special tokens. A cut inside a character is not valid
  /// UTF-8: see valid_utf8().
  std::string decode(const std::vector<int64_t>& ids, bool skip_special = true) const;

  /// Throws DataError naming both files unless `file` was made with this vocabulary.
  void require_same(const TokenFile& file) const;

 private:
  std::string path_;
  TokenizerInfo tokenizer_;
  at::Tensor bytes_tensor_;
  at::Tensor offsets_tensor_;
  at::Tensor special_tensor_;
  const char* bytes_ = nullptr;
  const int64_t* offsets_ = nullptr;
  const uint8_t* special_ = nullptr;
};

/// Replaces each part of `text` that is not UTF-8 with U+FFFD, for logs and terminals.
std::string valid_utf8(std::string_view text);

}  // namespace ddp
