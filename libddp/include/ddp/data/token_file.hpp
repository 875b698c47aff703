// SPDX-License-Identifier: Apache-2.0
// Text as token ids, prepared once (data/prepare_chat.py, data/prepare_text.py) and mapped into
// memory: token files and the vocabulary beside them. The format is described in data/README.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ddp {

/// What a file says of the vocabulary its ids belong to.
struct TokenizerInfo {
  int64_t vocab_size = 0;    ///< ids are 0 .. vocab_size - 1
  std::string identity;      ///< hash over the vocabulary's entries; equal means: equal ids
  std::string name;          ///< for people
  int64_t end_of_text = -1;  ///< the id that ends a document; -1: there is none
  int64_t end_of_turn = -1;  ///< the id that ends a turn of a chat; -1: there is none
  /// The ids above that there are: where decoding stops.
  std::vector<int64_t> end_tokens() const;
};

/// A question to a model: the ids it reads and what it should answer, its last id (an end of turn)
/// included. Earlier answers of the same document stand in the prompt, as the reference has them.
struct PromptReference {
  int64_t document = 0;
  int64_t answer = 0;  ///< of the document's, from 0
  std::vector<int64_t> prompt;
  std::vector<int64_t> reference;
};

/// One split. Any number of threads may read it. Documents are not empty; each lies behind the one
/// before.
class TokenFile {
 public:
  /// Maps `path` and checks it: all of its structure, and the ids of the first 2^26 tokens (at some
  /// 4 GB/s); ids beyond are checked where they are read. Throws DataError naming the file, for an
  /// id outside of the vocabulary also the document and the position in it.
  explicit TokenFile(const std::string& path);

  const std::string& path() const { return path_; }
  const std::string& name() const { return name_; }  ///< of the text, for people
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

  /// Whether the file tells which tokens are targets of the loss; where not, all of them are.
  bool has_targets() const { return targets_ != nullptr; }
  bool is_target(int64_t token) const { return targets_ == nullptr || targets_[token] != 0; }
  int64_t count_targets(int64_t begin, int64_t count) const;

  /// Each of a document's spans of targets (the answers of a chat) with all that stands before it,
  /// in order. A span at the document's begin answers nothing and is left out; a file without
  /// targets has no spans.
  std::vector<PromptReference> prompt_references(int64_t document) const;

 private:
  void check_ids(int64_t begin, int64_t count) const;
  [[noreturn]] void fail_id(int64_t token, int64_t id) const;

  std::string path_;
  std::string name_;
  TokenizerInfo tokenizer_;
  at::Tensor tokens_tensor_;  // these hold the mapping
  at::Tensor documents_tensor_;
  at::Tensor targets_tensor_;
  const uint16_t* tokens16_ = nullptr;  // one of the two
  const int32_t* tokens32_ = nullptr;
  const int64_t* documents_ = nullptr;
  const uint8_t* targets_ = nullptr;
  int64_t num_tokens_ = 0;
  int64_t num_documents_ = 0;
  int64_t num_checked_ = 0;  // tokens from the start whose ids are known to fit
};

/// The bytes that each id stands for: turns ids back into text without a tokenizer.
class Vocabulary {
 public:
  /// Reads `vocabulary.safetensors`. Throws DataError naming the file.
  explicit Vocabulary(const std::string& path);

  const std::string& path() const { return path_; }
  const TokenizerInfo& tokenizer() const { return tokenizer_; }
  int64_t size() const { return tokenizer_.vocab_size; }

  /// An id beyond the vocabulary (a model's padded head may give one) is U+FFFD.
  std::string_view bytes(int64_t id) const;
  /// Not text but structure: <|im_end|> and its kind.
  bool is_special(int64_t id) const;
  /// The id of exactly these bytes; of several the smallest.
  std::optional<int64_t> find(std::string_view bytes) const;

  /// The text of `ids`, special tokens left out where asked. Cut inside a character it is not valid
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

/// `text` with U+FFFD for each part that is not UTF-8: for logs and terminals.
std::string valid_utf8(std::string_view text);

}  // namespace ddp
