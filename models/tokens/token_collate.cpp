// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"
#include "models/tokens/token_dataset.hpp"
#include "models/tokens/token_masking.hpp"

namespace models {
namespace {

using ddp::concat;
using ddp::SettingsError;
using ddp::TensorVisitor;

constexpr int64_t kWidthStep = 64;

// Stacks rows and fills the rest of each row with `padding`.
at::Tensor stack_rows(const std::vector<TokenExample>& examples,
                      std::vector<int32_t> TokenExample::*rows, int64_t width, int64_t padding) {
  at::Tensor result = at::empty({static_cast<int64_t>(examples.size()), width}, at::kLong);
  auto* out = result.mutable_data_ptr<int64_t>();
  for (const auto& example : examples) {
    const auto& row = example.*rows;
    auto* end = std::copy(row.begin(), row.end(), out);
    out += width;
    std::fill(end, out, padding);
  }
  return result;
}

// A row's padding is a separate document. It attends to itself, and its positions stay within the
// position tables.
void add_documents(const std::vector<TokenExample>& examples, int64_t width, TokenBatch& batch) {
  std::vector<int32_t> offsets{0};
  const auto add = [&](int64_t length) {
    offsets.push_back(static_cast<int32_t>(offsets.back() + length));
    batch.max_document_length = std::max(batch.max_document_length, length);
  };
  auto* positions = batch.position_ids.mutable_data_ptr<int64_t>();
  for (const auto& example : examples) {
    for (const int32_t length : example.doc_lengths) {
      add(length);
    }
    const auto used = static_cast<int64_t>(example.input_ids.size());
    if (used < width) {
      add(width - used);
      std::iota(positions + used, positions + width, int64_t{0});
    }
    positions += width;
  }
  batch.document_offsets = at::empty({static_cast<int64_t>(offsets.size())}, at::kInt);
  std::copy(offsets.begin(), offsets.end(), batch.document_offsets.mutable_data_ptr<int32_t>());
}

// Replaces labels [rows, width] by those of the targets, padded to `count`. The places that only
// pad are 0: their labels are ignored.
void gather_targets(int64_t count, TokenBatch& batch) {
  const auto labels = batch.labels;
  batch.labels = at::full({count}, kIgnoredLabel, at::kLong);
  batch.target_positions = at::zeros({count}, at::kLong);
  const auto* all = labels.const_data_ptr<int64_t>();
  auto* target = batch.labels.mutable_data_ptr<int64_t>();
  auto* place = batch.target_positions.mutable_data_ptr<int64_t>();
  int64_t found = 0;
  for (int64_t i = 0; i < labels.numel(); ++i) {
    if (all[i] != kIgnoredLabel) {
      DDP_CHECK(found < count, found, " of ", count);
      target[found] = all[i];
      place[found++] = i;
    }
  }
}

}  // namespace

void for_each_tensor(TokenBatch& batch, const TensorVisitor& visit) {
  visit(batch.input_ids);
  visit(batch.labels);
  visit(batch.position_ids);
  visit(batch.document_offsets);
  visit(batch.target_positions);
  visit(batch.max_document_length);
  visit(batch.num_documents);
  visit(batch.num_tokens);
  visit(batch.num_targets);
}

TokenCollate::TokenCollate(TokenLayout layout, int64_t max_seq_len)
    : packed_(layout == TokenLayout::Pack), max_seq_len_(max_seq_len) {
  if (max_seq_len < 1) {
    throw SettingsError(concat("TokenCollate: max_seq_len=", max_seq_len));
  }
}

TokenCollate::TokenCollate(const TokenDataset& dataset, std::shared_ptr<const TokenMasking> masking)
    : TokenCollate(dataset) {
  masking_ = std::move(masking);
}

TokenBatch TokenCollate::operator()(std::vector<TokenExample> examples) const {
  TokenBatch batch;
  int64_t width = packed_ ? max_seq_len_ : 0;
  int64_t shortest = max_seq_len_;
  for (auto& example : examples) {
    if (masking_ != nullptr) {
      masking_->mask(example);
    }
    const auto length = static_cast<int64_t>(example.input_ids.size());
    DDP_CHECK(length <= max_seq_len_, length, " > ", max_seq_len_);
    width = std::max(width, length);
    shortest = std::min(shortest, length);
    batch.num_tokens += length;
    batch.num_documents += static_cast<int64_t>(example.doc_lengths.size());
    batch.num_targets += static_cast<int64_t>(example.labels.size()) -
                         std::count(example.labels.begin(), example.labels.end(), kIgnoredLabel);
  }
  // Few widths, because CUDA kernels are chosen, and some compiled, for each shape.
  width = std::min(max_seq_len_, (width + kWidthStep - 1) / kWidthStep * kWidthStep);
  const auto total = static_cast<int64_t>(examples.size()) * width;
  if (total > std::numeric_limits<int32_t>::max()) {
    throw SettingsError(concat("a batch of ", examples.size(), " rows of ", width,
                               " tokens is too large: reduce loader.batch_size"));
  }
  batch.input_ids = stack_rows(examples, &TokenExample::input_ids, width, 0);
  batch.labels = stack_rows(examples, &TokenExample::labels, width, kIgnoredLabel);
  // A masked model reads its whole row, so padding needs a document of its own.
  if (packed_ || (masking_ != nullptr && shortest < width)) {
    batch.position_ids = stack_rows(examples, &TokenExample::positions, width, 0);
    add_documents(examples, width, batch);
  }
  if (masking_ != nullptr && !masking_->options().full_head) {
    gather_targets(batch.size() * masking_->max_targets(width), batch);
  }
  return batch;
}

}  // namespace models
