// SPDX-License-Identifier: Apache-2.0
// Language-model data: token files as windows, padded or packed sequences. Files and vocabulary are
// prepared once by data/prepare_chat.py or data/prepare_text.py; data/README.md has the format.
//
//   auto dataset = std::make_shared<ddp::TokenDataset>(options, ddp::Split::Train);
//   dataset->require_vocab(model->vocab_size());
//   ddp::DistributedSampler sampler(dataset->size(), ctx.communicator(), cfg.sampler);
//   ddp::DataLoader loader(dataset, sampler, ctx.device(), cfg.loader,
//   ddp::TokenCollate(*dataset)); ddp::TokenBatch batch = loader.next();
//
// A sample is a row: several documents (Pack), one document (Pad) or a window (Stream).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/core/visit_tensors.hpp"
#include "ddp/data/dataset.hpp"

namespace ddp {

/// The vocabulary of a file's ids.
struct TokenizerInfo {
  int64_t vocab_size = 0;    ///< ids are 0 .. vocab_size - 1
  std::string identity;      ///< hash over the vocabulary's entries; equal hashes mean equal ids
  std::string name;          ///< for people
  int64_t end_of_text = -1;  ///< the id that ends a document; -1: none
  int64_t end_of_turn = -1;  ///< the id that ends a turn of a chat; -1: none
  std::vector<int64_t> end_tokens() const;  ///< end_of_text and end_of_turn, if present
};

/// A prompt (with the document's earlier answers) and its reference answer, up to its end of turn.
struct PromptReference {
  int64_t document = 0;
  int64_t answer = 0;  ///< number in the document, from 0
  std::vector<int64_t> prompt;
  std::vector<int64_t> reference;
};

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

/// The bytes of each id: turns ids back into text without a tokenizer.
class Vocabulary {
 public:
  /// Reads `vocabulary.safetensors`. Throws DataError naming the file.
  explicit Vocabulary(const std::string& path);

  const std::string& path() const { return path_; }
  const TokenizerInfo& tokenizer() const { return tokenizer_; }
  int64_t size() const { return tokenizer_.vocab_size; }

  std::string_view bytes(int64_t id) const;  ///< U+FFFD for an id beyond the vocabulary
  bool is_special(int64_t id) const;         ///< structure, not text, such as <|im_end|>
  /// The smallest id with exactly these bytes.
  std::optional<int64_t> find(std::string_view bytes) const;

  /// The text of `ids`. A cut inside a character is not valid UTF-8: see valid_utf8().
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

/// Label of a token that does not count in the loss, as in PyTorch's cross entropy.
inline constexpr int32_t kIgnoredLabel = -100;

enum class TokenLayout {
  Pack,   ///< several documents per row of max_seq_len; each attends to itself only
  Pad,    ///< one document per row, padded to the batch's longest
  Stream  ///< the file as one text, cut into windows of max_seq_len (pre-training)
};
/// How documents longer than max_seq_len are handled (not with Stream).
enum class LongDocuments {
  Split,     ///< into pieces that do not attend to each other; keeps every target
  Truncate,  ///< keeps the first max_seq_len tokens
  Drop
};

struct TokenDataOptions {
  std::string path = "data/chat-sample";  ///< folder with train.safetensors and eval.safetensors
  int64_t max_seq_len = 1024;             ///< tokens per row
  TokenLayout layout = TokenLayout::Pack;
  LongDocuments long_documents = LongDocuments::Truncate;
  int64_t num_samples = 0;  ///< only the first n documents; 0: all
  int64_t seed = 0;         ///< for the start of an epoch's windows (Stream)
};
void describe_fields(TokenDataOptions& options, FieldVisitor& visitor);

/// A row of a batch before it is collated.
struct TokenExample {
  std::vector<int32_t> input_ids;
  std::vector<int32_t> labels;       ///< the token that follows, or kIgnoredLabel
  std::vector<int32_t> positions;    ///< inside each document
  std::vector<int32_t> doc_lengths;  ///< of the documents in the row, in order
};

/// Contents of a data set's rows in one epoch.
struct TokenStatistics {
  int64_t num_documents = 0;
  int64_t num_long = 0;  ///< documents longer than max_seq_len: split, truncated or dropped
  int64_t num_without_targets = 0;  ///< skipped: pieces and (truncated) documents without targets
  int64_t num_rows = 0;
  int64_t num_tokens = 0;   ///< in rows, without padding
  int64_t num_targets = 0;  ///< labels in rows that count
  int64_t num_tokens_left_out = 0;
  int64_t num_targets_left_out = 0;
  /// Pack: 1 - num_tokens / (num_rows * max_seq_len). Pad: 0 (each TokenBatch has its own).
  double padding_share = 0;
};

class TokenDataset {
 public:
  /// Opens `train.safetensors` (Split::Train) or `eval.safetensors` (Split::Test) in options.path.
  /// Throws SettingsError for wrong options. Throws DataError naming the file if it is missing,
  /// damaged or empty, if no document fits the options, or if its vocabulary is not that of
  /// `vocabulary.safetensors` in the folder.
  TokenDataset(const TokenDataOptions& options, Split split);

  int64_t size() const;  ///< rows
  TokenExample get(int64_t index) const { return get_for_epoch(index, 0); }
  /// Any thread. Pack and Pad return the same row in every epoch. With Stream, Split::Train's
  /// windows begin at an offset below max_seq_len drawn from (seed, epoch); up to two windows of
  /// tokens at the ends are skipped. Split::Test's cover all tokens; the last may be shorter.
  TokenExample get_for_epoch(int64_t index, int64_t epoch) const;

  /// Throws DataError naming both sizes if the file's vocabulary is larger than `vocab_size`.
  void require_vocab(int64_t vocab_size) const;

  /// The first `limit` answers (0: all), in document order; see TokenFile.
  std::vector<PromptReference> prompt_references(int64_t limit = 0) const;

  const TokenFile& file() const { return *file_; }
  /// Throws DataError if the token file's folder has no `vocabulary.safetensors`.
  const Vocabulary& vocabulary() const;
  const TokenDataOptions& options() const { return options_; }
  const TokenStatistics& statistics() const { return statistics_; }
  std::string summary() const;  ///< the statistics in one log line

 private:
  struct Piece {
    int64_t begin = 0;  // token index in the file
    int32_t length = 0;
    bool continues = false;  // in the same document: the last token has a label too
  };

  int64_t cut_documents();
  void add_piece(const Piece& piece);
  void pack_rows();
  void lay_out_windows();
  Piece window(int64_t index, int64_t epoch) const;
  void append(const Piece& piece, TokenExample& example) const;
  int64_t count_labels(const Piece& piece) const;

  TokenDataOptions options_;
  Split split_;
  std::shared_ptr<const TokenFile> file_;
  std::shared_ptr<const Vocabulary> vocabulary_;
  std::vector<Piece> pieces_;       // Pack and Pad
  std::vector<int64_t> row_begin_;  // Pack: where each row begins in row_pieces_, and the end
  std::vector<int64_t> row_pieces_;
  int64_t stream_tokens_ = 0;  // Stream: tokens of the documents used
  int64_t num_windows_ = 0;
  int64_t max_offset_ = 0;  // Stream: of an epoch's first window
  TokenStatistics statistics_;
};

/// Sequences of one length; tensors are int64 [batch, seq] unless stated.
struct TokenBatch {
  at::Tensor input_ids;
  at::Tensor labels;                ///< already shifted; kIgnoredLabel: not in the loss
  at::Tensor position_ids;          ///< Pack only; undefined means 0 … seq - 1
  at::Tensor document_offsets;      ///< Pack only: int32 [documents + 1] over batch * seq tokens;
                                    ///< padding counts as documents
  int64_t max_document_length = 0;  ///< padding documents included
  int64_t num_documents = 0;        ///< without padding
  int64_t num_tokens = 0;           ///< without padding
  int64_t num_targets = 0;          ///< labels that count
  int64_t size() const { return input_ids.size(0); }
};
inline void for_each_tensor(TokenBatch& batch, const TensorVisitor& visit) {
  visit(batch.input_ids);
  visit(batch.labels);
  visit(batch.position_ids);
  visit(batch.document_offsets);
  visit(batch.max_document_length);
  visit(batch.num_documents);
  visit(batch.num_tokens);
  visit(batch.num_targets);
}

/// Padding is id 0 and never a label. Packed rows are max_seq_len long; other rows have the length
/// of the batch's longest, rounded up to a multiple of 64, at most max_seq_len.
class TokenCollate {
 public:
  TokenCollate(TokenLayout layout, int64_t max_seq_len);
  explicit TokenCollate(const TokenDataset& dataset)
      : TokenCollate(dataset.options().layout, dataset.options().max_seq_len) {}
  TokenBatch operator()(std::vector<TokenExample> examples) const;

 private:
  bool packed_;
  int64_t max_seq_len_;
};

}  // namespace ddp
