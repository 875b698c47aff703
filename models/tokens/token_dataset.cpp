// SPDX-License-Identifier: Apache-2.0
#include "models/tokens/token_dataset.hpp"

#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <limits>
#include <numeric>
#include <sstream>
#include <system_error>

#include "ddp/core/error.hpp"
#include "ddp/data/sample_rng.hpp"
#include "ddp/detail/check.hpp"
#include "tokens/document_packing.hpp"
#include "tokens/token_file.hpp"
#include "tokens/token_metadata.hpp"

namespace models {
namespace {

using ddp::concat;
using ddp::DataError;
using ddp::FieldVisitor;
using ddp::SampleRng;
using ddp::SettingsError;
using ddp::Split;

constexpr int64_t kMaxSequence = int64_t{1} << 24;

const char* file_name(Split split) {
  return split == Split::Train ? "train.safetensors" : "eval.safetensors";
}

void check_options(const TokenDataOptions& o) {
  if (o.max_seq_len < 2 || o.max_seq_len > kMaxSequence) {
    throw SettingsError(
        concat("token data: max_seq_len=", o.max_seq_len, " must be from 2 to ", kMaxSequence));
  }
  if (o.num_samples < 0 || o.seed < 0) {
    throw SettingsError(concat("token data: num_samples=", o.num_samples, " and seed=", o.seed,
                               " must not be negative"));
  }
}

const char* past_tense(LongDocuments policy) {
  switch (policy) {
    case LongDocuments::Split:
      return "split";
    case LongDocuments::Truncate:
      return "truncated";
    case LongDocuments::Drop:
      break;
  }
  return "dropped";
}

}  // namespace

void describe_fields(TokenDataOptions& o, FieldVisitor& v) {
  v.field({.name = "path",
           .doc = "Folder with train.safetensors and eval.safetensors (data/prepare_*.py).",
           .may_differ = true,
           .common = true},
          o.path);
  v.field({.name = "max_seq_len",
           .doc = "Tokens per row.",
           .min = 2,
           .max = kMaxSequence,
           .common = true},
          o.max_seq_len);
  v.field(
      {.name = "layout",
       .doc = "pack: several documents per row with attention inside each. pad: one document per "
              "row. stream: windows over the whole text."},
      o.layout,
      {{"pack", TokenLayout::Pack}, {"pad", TokenLayout::Pad}, {"stream", TokenLayout::Stream}});
  v.field({.name = "long_documents", .doc = "Treatment of documents longer than max_seq_len."},
          o.long_documents,
          {{"split", LongDocuments::Split},
           {"truncate", LongDocuments::Truncate},
           {"drop", LongDocuments::Drop}});
  v.field({.name = "num_samples", .doc = "Use only the first n documents. 0: all.", .min = 0},
          o.num_samples);
  v.field({.name = "seed", .doc = "stream: seed for the offset of an epoch's windows.", .min = 0},
          o.seed);
}

// The documents of a split, laid out as rows.
class TokenDataset::Rows {
 public:
  Rows(const TokenDataOptions& options, Split split);

  int64_t size() const;
  TokenExample get(int64_t index, int64_t epoch) const;
  const TokenDataOptions& options() const { return options_; }
  const TokenStatistics& statistics() const { return statistics_; }
  const detail::TokenFile& file() const { return *file_; }
  const Vocabulary* vocabulary() const { return vocabulary_.get(); }

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
  std::unique_ptr<const detail::TokenFile> file_;
  std::unique_ptr<const Vocabulary> vocabulary_;
  std::vector<Piece> pieces_;       // Pack and Pad
  std::vector<int64_t> row_begin_;  // Pack: where each row begins in row_pieces_, and the end
  std::vector<int64_t> row_pieces_;
  int64_t stream_tokens_ = 0;  // Stream: tokens of the documents used
  int64_t num_windows_ = 0;
  int64_t max_offset_ = 0;  // Stream: of an epoch's first window
  TokenStatistics statistics_;
};

TokenDataset::Rows::Rows(const TokenDataOptions& options, Split split)
    : options_(options), split_(split) {
  check_options(options_);
  const std::filesystem::path folder(options_.path);
  file_ = std::make_unique<detail::TokenFile>((folder / file_name(split)).string());
  const auto vocabulary = folder / "vocabulary.safetensors";
  std::error_code unknown;  // as of a loop of links: opening the file throws the reason
  if (std::filesystem::exists(vocabulary, unknown) || unknown) {
    vocabulary_ = std::make_unique<Vocabulary>(vocabulary.string());
    detail::require_same_vocabulary(*vocabulary_, *file_);
  }
  const int64_t all = file_->num_documents();
  statistics_.num_documents = options_.num_samples > 0 ? std::min(options_.num_samples, all) : all;
  const int64_t last = statistics_.num_documents - 1;
  const int64_t tokens = file_->document_begin(last) + file_->document_length(last);
  int64_t targets = 0;
  if (options_.layout == TokenLayout::Stream) {
    stream_tokens_ = tokens;
    targets = file_->count_targets(1, tokens - 1);
    lay_out_windows();
  } else {
    targets = cut_documents();
    if (pieces_.empty()) {
      throw DataError(concat(
          file_->path(), ": none of its documents gives a target within max_seq_len=",
          options_.max_seq_len, " (", statistics_.num_long, " of ", statistics_.num_documents,
          " are longer); fix: a larger tokens.max_seq_len, or tokens.long_documents=split"));
    }
    if (options_.layout == TokenLayout::Pack) {
      pack_rows();
    }
  }
  statistics_.num_rows = size();
  statistics_.num_tokens_left_out = tokens - statistics_.num_tokens;
  statistics_.num_targets_left_out = targets - statistics_.num_targets;
}

// Returns the targets of all documents used, including those that are dropped.
int64_t TokenDataset::Rows::cut_documents() {
  const int64_t limit = options_.max_seq_len;
  int64_t targets = 0;
  for (int64_t document = 0; document < statistics_.num_documents; ++document) {
    const int64_t begin = file_->document_begin(document);
    const int64_t length = file_->document_length(document);
    targets += file_->count_targets(begin + 1, length - 1);
    if (length <= limit) {
      add_piece({begin, static_cast<int32_t>(length), false});
      continue;
    }
    ++statistics_.num_long;
    if (options_.long_documents == LongDocuments::Truncate) {
      add_piece({begin, static_cast<int32_t>(limit), false});
    } else if (options_.long_documents == LongDocuments::Split) {
      for (int64_t done = 0; done < length; done += limit) {
        const int64_t part = std::min(limit, length - done);
        add_piece({begin + done, static_cast<int32_t>(part), done + part < length});
      }
    }
  }
  return targets;
}

void TokenDataset::Rows::add_piece(const Piece& piece) {
  const int64_t targets = count_labels(piece);
  if (targets == 0) {
    ++statistics_.num_without_targets;
    return;
  }
  pieces_.push_back(piece);
  statistics_.num_tokens += piece.length;
  statistics_.num_targets += targets;
}

void TokenDataset::Rows::pack_rows() {
  std::vector<int32_t> lengths(pieces_.size());
  std::transform(pieces_.begin(), pieces_.end(), lengths.begin(),
                 [](const Piece& piece) { return piece.length; });
  auto rows = detail::pack_best_fit(lengths, options_.max_seq_len);
  row_begin_ = std::move(rows.begin);
  row_pieces_ = std::move(rows.items);
  statistics_.padding_share = 1 - static_cast<double>(statistics_.num_tokens) /
                                      static_cast<double>(size() * options_.max_seq_len);
}

void TokenDataset::Rows::lay_out_windows() {
  const int64_t width = options_.max_seq_len;
  const int64_t labels = stream_tokens_ - 1;
  if (split_ == Split::Train) {
    if (labels < width) {
      detail::refuse_token_file(
          file_->path(),
          concat("it holds ", stream_tokens_, " tokens, a window of max_seq_len=", width,
                 " and the token after it need ", width + 1, "; lower max_seq_len"));
    }
    // As many windows as fit after any offset, so all epochs have the same length.
    num_windows_ = std::max<int64_t>(1, (stream_tokens_ - width) / width);
    max_offset_ = std::min(width - 1, labels - num_windows_ * width);
  } else {
    if (labels < 1) {
      detail::refuse_token_file(file_->path(), "it holds one token: nothing follows it");
    }
    num_windows_ = (labels + width - 1) / width;
  }
  for (int64_t i = 0; i < num_windows_; ++i) {
    const Piece piece = window(i, 0);
    statistics_.num_tokens += piece.length;
    statistics_.num_targets += count_labels(piece);
  }
}

TokenDataset::Rows::Piece TokenDataset::Rows::window(int64_t index, int64_t epoch) const {
  int64_t offset = 0;
  if (max_offset_ > 0) {
    SampleRng rng(static_cast<uint64_t>(options_.seed), static_cast<uint64_t>(epoch), 0);
    offset = rng.below(static_cast<uint32_t>(max_offset_ + 1));
  }
  const int64_t begin = offset + index * options_.max_seq_len;
  const int64_t length = std::min(options_.max_seq_len, stream_tokens_ - 1 - begin);
  return {begin, static_cast<int32_t>(length), true};
}

int64_t TokenDataset::Rows::count_labels(const Piece& piece) const {
  return file_->count_targets(piece.begin + 1, piece.length - (piece.continues ? 0 : 1));
}

int64_t TokenDataset::Rows::size() const {
  switch (options_.layout) {
    case TokenLayout::Pack:
      return static_cast<int64_t>(row_begin_.size()) - 1;
    case TokenLayout::Pad:
      return static_cast<int64_t>(pieces_.size());
    case TokenLayout::Stream:
      break;
  }
  return num_windows_;
}

void TokenDataset::Rows::append(const Piece& piece, TokenExample& example) const {
  const size_t at = example.input_ids.size();
  const size_t length = static_cast<size_t>(piece.length);
  example.input_ids.resize(at + length);
  example.labels.resize(at + length, kIgnoredLabel);
  example.positions.resize(at + length);
  file_->copy_tokens(piece.begin, piece.length, example.input_ids.data() + at);
  int32_t* labels = example.labels.data() + at;
  const int64_t num_labels = piece.length - (piece.continues ? 0 : 1);
  file_->copy_tokens(piece.begin + 1, num_labels, labels);
  if (file_->has_targets()) {
    for (int64_t i = 0; i < num_labels; ++i) {
      labels[i] = file_->is_target(piece.begin + 1 + i) ? labels[i] : kIgnoredLabel;
    }
  }
  std::iota(example.positions.begin() + static_cast<int64_t>(at), example.positions.end(), 0);
  example.doc_lengths.push_back(piece.length);
}

TokenExample TokenDataset::Rows::get(int64_t index, int64_t epoch) const {
  DDP_CHECK(index >= 0 && index < size(), index, " of ", size());
  TokenExample example;
  example.index = index;
  example.epoch = split_ == Split::Train ? epoch : 0;
  if (options_.layout == TokenLayout::Stream) {
    append(window(index, epoch), example);
  } else if (options_.layout == TokenLayout::Pad) {
    append(pieces_[index], example);
  } else {
    const auto width = static_cast<size_t>(options_.max_seq_len);
    for (auto* row : {&example.input_ids, &example.labels, &example.positions}) {
      row->reserve(width);
    }
    for (int64_t i = row_begin_[index]; i < row_begin_[index + 1]; ++i) {
      append(pieces_[row_pieces_[i]], example);
    }
  }
  return example;
}

TokenDataset::TokenDataset(const TokenDataOptions& options, Split split)
    : rows_(std::make_shared<const Rows>(options, split)) {}

int64_t TokenDataset::size() const {
  return rows_->size();
}

TokenExample TokenDataset::get_for_epoch(int64_t index, int64_t epoch) const {
  return rows_->get(index, epoch);
}

const TokenDataOptions& TokenDataset::options() const {
  return rows_->options();
}

const TokenStatistics& TokenDataset::statistics() const {
  return rows_->statistics();
}

const std::string& TokenDataset::path() const {
  return rows_->file().path();
}

const TokenizerInfo& TokenDataset::tokenizer() const {
  return rows_->file().tokenizer();
}

void TokenDataset::require_vocab(int64_t vocab_size) const {
  const TokenizerInfo& own = tokenizer();
  if (own.vocab_size > vocab_size) {
    throw DataError(concat(path(), " was made with a vocabulary of ", own.vocab_size, " ids",
                           own.name.empty() ? "" : " (" + own.name + ")", ", the model has ",
                           vocab_size,
                           "; fix: prepare the text with the model's own tokenizer (--tokenizer), "
                           "or give the model that vocab_size"));
  }
}

std::vector<PromptReference> TokenDataset::prompt_references(int64_t limit) const {
  std::vector<PromptReference> result;
  for (int64_t document = 0; document < statistics().num_documents; ++document) {
    for (auto& found : rows_->file().prompt_references(document)) {
      result.push_back(std::move(found));
      if (static_cast<int64_t>(result.size()) == limit) {
        return result;
      }
    }
  }
  return result;
}

const Vocabulary& TokenDataset::vocabulary() const {
  if (rows_->vocabulary() == nullptr) {
    throw DataError(concat(options().path, " has no vocabulary.safetensors to turn ids into text",
                           detail::kTokenFileFix));
  }
  return *rows_->vocabulary();
}

std::string TokenDataset::summary(bool masked) const {
  const TokenStatistics& s = statistics();
  std::ostringstream out;
  out << path() << ": " << s.num_documents << " documents in " << s.num_rows
      << (options().layout == TokenLayout::Stream ? " windows" : " rows") << " of up to "
      << options().max_seq_len << ", " << s.num_tokens << " tokens";
  if (!masked) {
    out << ", " << s.num_targets << " of them targets";
  }
  if (options().layout == TokenLayout::Pack) {
    out << ", " << std::fixed << std::setprecision(2) << 100 * s.padding_share << " % padding";
  }
  if (s.num_long > 0) {
    out << "; " << s.num_long << " longer than max_seq_len "
        << past_tense(options().long_documents);
  }
  if (s.num_without_targets > 0) {
    out << "; " << s.num_without_targets << " without a target left out";
  }
  if (s.num_tokens_left_out > 0) {
    out << "; not in rows: " << s.num_tokens_left_out << " tokens";
    if (!masked) {
      out << ", " << s.num_targets_left_out << " targets";
    }
  }
  return out.str();
}

}  // namespace models
