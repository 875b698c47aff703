// SPDX-License-Identifier: Apache-2.0
// Language-model data: token files as windows, padded or packed sequences. Files and vocabulary are
// prepared once by data/prepare_chat.py or data/prepare_text.py; data/README.md has the format.
//
//   auto dataset = std::make_shared<models::TokenDataset>(options, ddp::Split::Train);
//   ddp::DistributedSampler sampler(dataset->size(), ctx.communicator(), cfg.sampler);
//   models::TokenCollate collate(*dataset);
//   ddp::DataLoader loader(dataset, sampler, ctx.device(), cfg.loader, collate);
//   models::TokenBatch batch = loader.next();
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/data/dataset.hpp"

namespace models {

/// The tokenizer that made a token file.
struct TokenizerInfo {
  int64_t vocab_size = 0;    ///< ids are 0 .. vocab_size - 1
  std::string identity;      ///< hash over the vocabulary's entries; equal hashes mean equal ids
  std::string name;          ///< for people
  int64_t end_of_text = -1;  ///< the id that ends a document; -1: none
  int64_t end_of_turn = -1;  ///< the id that ends a turn of a chat; -1: none
  std::vector<int64_t> end_tokens() const;  ///< end_of_text and end_of_turn, if present
};

/// The bytes of each id: turns ids back into text without a tokenizer.
class Vocabulary {
 public:
  /// Reads `vocabulary.safetensors`. Throws DataError naming the file.
  explicit Vocabulary(const std::string& path);

  const std::string& path() const;                         ///< as given to the constructor
  const TokenizerInfo& tokenizer() const;                  ///< of the ids
  int64_t size() const { return tokenizer().vocab_size; }  ///< ids

  std::string_view bytes(int64_t id) const;  ///< U+FFFD for an id beyond the vocabulary
  bool is_special(int64_t id) const;         ///< structure, not text, such as <|im_end|>
  std::optional<int64_t> find(std::string_view bytes) const;  ///< the smallest such id
  /// The text of `ids`. A cut inside a character is not valid UTF-8: see valid_utf8().
  std::string decode(const std::vector<int64_t>& ids, bool skip_special = true) const;

 private:
  struct Entries;
  std::shared_ptr<const Entries> entries_;
};

/// Replaces each part of `text` that is not UTF-8 with U+FFFD, for logs and terminals.
std::string valid_utf8(std::string_view text);

inline constexpr int32_t kIgnoredLabel = -100;  ///< of a token that is not in the loss

/// How documents become rows.
enum class TokenLayout {
  Pack,   ///< several documents per row of max_seq_len; each attends to itself only
  Pad,    ///< one document per row, padded to the batch's longest
  Stream  ///< a window of max_seq_len over the file as one text (pre-training)
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
void describe_fields(TokenDataOptions& options, ddp::FieldVisitor& visitor);

/// A row of a batch before it is collated.
struct TokenExample {
  std::vector<int32_t> input_ids;    ///< of the row's tokens
  std::vector<int32_t> labels;       ///< the token that follows, or kIgnoredLabel
  std::vector<int32_t> positions;    ///< inside each document
  std::vector<int32_t> doc_lengths;  ///< of the documents in the row, in order
  int64_t index = 0;                 ///< of the row in its data set
  int64_t epoch = 0;                 ///< 0 in every epoch of Split::Test
};

/// Contents of a data set's rows in one epoch.
struct TokenStatistics {
  int64_t num_documents = 0;  ///< that the options select
  int64_t num_long = 0;       ///< documents longer than max_seq_len: split, truncated or dropped
  int64_t num_without_targets = 0;   ///< skipped: pieces and (truncated) documents without targets
  int64_t num_rows = 0;              ///< TokenDataset::size()
  int64_t num_tokens = 0;            ///< in rows, without padding
  int64_t num_targets = 0;           ///< labels in rows that are not kIgnoredLabel
  int64_t num_tokens_left_out = 0;   ///< by truncating, dropping and skipping
  int64_t num_targets_left_out = 0;  ///< by truncating, dropping and skipping
  /// Pack: 1 - num_tokens / (num_rows * max_seq_len). Else 0: with Pad each batch has its own.
  double padding_share = 0;
};

/// A prompt (with the document's earlier answers) and its reference answer, up to its end of turn.
struct PromptReference {
  int64_t document = 0;            ///< number in the file, from 0
  int64_t answer = 0;              ///< number in the document, from 0
  std::vector<int64_t> prompt;     ///< ids before the answer
  std::vector<int64_t> reference;  ///< ids of the answer
};

class TokenDataset {
 public:
  /// Opens `train.safetensors` (Split::Train) or `eval.safetensors` (Split::Test) in options.path.
  /// Throws SettingsError for wrong options, DataError for a file that is missing, damaged, empty
  /// or of another vocabulary than the folder's `vocabulary.safetensors`, and if no document fits
  /// the options. Ids beyond the first 2^26 tokens are checked when read.
  TokenDataset(const TokenDataOptions& options, ddp::Split split);

  int64_t size() const;                                                      ///< rows
  TokenExample get(int64_t index) const { return get_for_epoch(index, 0); }  ///< row of epoch 0
  /// Any thread. Pack and Pad return the same row in every epoch. With Stream, Split::Train's
  /// windows begin at an offset below max_seq_len drawn from (seed, epoch); up to two windows of
  /// tokens at the ends are skipped. Split::Test's cover all tokens; the last may be shorter.
  TokenExample get_for_epoch(int64_t index, int64_t epoch) const;

  /// Throws DataError naming both sizes if the file's vocabulary is larger than `vocab_size`.
  void require_vocab(int64_t vocab_size) const;
  /// The first `limit` answers (spans of targets; 0: all) in document order, each with all tokens
  /// before it. A span at the start of a document is left out, because it has no prompt.
  std::vector<PromptReference> prompt_references(int64_t limit = 0) const;

  const std::string& path() const;            ///< of the token file
  const TokenizerInfo& tokenizer() const;     ///< the token file's
  const Vocabulary& vocabulary() const;       ///< throws DataError if the folder has none
  const TokenDataOptions& options() const;    ///< as given to the constructor
  const TokenStatistics& statistics() const;  ///< of any epoch
  /// The statistics in one log line. `masked`: without the counts of targets, which masks draw.
  std::string summary(bool masked = false) const;

 private:
  class Rows;
  std::shared_ptr<const Rows> rows_;
};

/// Sequences of one length; tensors are int64 [batch, seq] unless stated.
struct TokenBatch {
  at::Tensor input_ids;             ///< padding: id 0
  at::Tensor labels;                ///< already shifted; kIgnoredLabel: not in the loss
  at::Tensor position_ids;          ///< Pack, and masked rows with padding; else undefined, which
                                    ///< means 0 … seq - 1
  at::Tensor document_offsets;      ///< defined if position_ids are: int32 [segments + 1] over
                                    ///< batch * seq tokens; a segment is a document or a row's
                                    ///< padding
  at::Tensor target_positions;      ///< masked, without full_head: [targets], the places of the
                                    ///< labels in the flattened batch; the labels are [targets] too
  int64_t max_document_length = 0;  ///< of the segments
  int64_t num_documents = 0;        ///< without padding
  int64_t num_tokens = 0;           ///< without padding
  int64_t num_targets = 0;          ///< labels that are not kIgnoredLabel
  int64_t size() const { return input_ids.size(0); }  ///< batch
};
void for_each_tensor(TokenBatch& batch, const ddp::TensorVisitor& visit);

class TokenMasking;

/// Padding is id 0 and never a label. With `masking` the labels are the hidden tokens, not the next
/// ones. Unless it has full_head, the batch has rows * masking.max_targets(width) target_positions,
/// however many tokens are targets; the remaining labels are kIgnoredLabel. Packed rows are
/// max_seq_len long; other rows have the length of the batch's longest, rounded up to a multiple of
/// 64, at most max_seq_len.
class TokenCollate {
 public:
  TokenCollate(TokenLayout layout, int64_t max_seq_len);  ///< without masks
  /// For the layout and row length of `dataset`.
  explicit TokenCollate(const TokenDataset& dataset)
      : TokenCollate(dataset.options().layout, dataset.options().max_seq_len) {}
  /// With masks: the labels are the hidden tokens.
  TokenCollate(const TokenDataset& dataset, std::shared_ptr<const TokenMasking> masking);
  TokenBatch operator()(
      std::vector<TokenExample> examples) const;  ///< in the order of the examples

 private:
  bool packed_;
  int64_t max_seq_len_;
  std::shared_ptr<const TokenMasking> masking_;
};

}  // namespace models
