// SPDX-License-Identifier: Apache-2.0
// Language-model data: token files (docs in data/README.md), as windows, padded or packed
// sequences.
//
//   auto dataset = std::make_shared<ddp::TokenDataset>(options, ddp::Split::Train);
//   ddp::DataLoader loader(dataset, sampler, ctx.device(), cfg.loader, ddp::TokenCollate(dataset));
//   ddp::TokenBatch batch = loader.next();
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/data/dataset.hpp"

namespace ddp {

enum class TokenLayout {
  Pack,   ///< documents side by side in rows of max_seq_len; attention stays inside each
  Pad,    ///< one document a row, filled up to the batch's longest
  Stream  ///< the file as one text, cut into windows of max_seq_len (pre-training)
};
/// What becomes of a document longer than max_seq_len.
enum class LongDocuments { Split, Truncate, Drop };

struct TokenDataOptions {
  std::string path = "data/chat-sample";  ///< folder with train.safetensors and eval.safetensors
  int64_t max_seq_len = 1024;             ///< tokens a row
  TokenLayout layout = TokenLayout::Pack;
  LongDocuments long_documents = LongDocuments::Truncate;
  int64_t num_samples = 0;  ///< only the first n documents; 0: all
  int64_t seed = 0;         ///< of where an epoch's windows begin (stream)
};
void describe_fields(TokenDataOptions& options, FieldVisitor& visitor);

/// A row of a batch before it is collated.
struct TokenExample {
  std::vector<int32_t> input_ids;
  std::vector<int32_t> labels;       ///< the token that follows, or -100
  std::vector<int32_t> positions;    ///< inside each document
  std::vector<int32_t> doc_lengths;  ///< of the documents in the row, in order
};

/// Sequences of one length; tensors int64 [batch, seq] unless said.
struct TokenBatch {
  at::Tensor input_ids;
  at::Tensor labels;            ///< already shifted; -100 where nothing counts
  at::Tensor position_ids;      ///< Pack; else undefined: 0 … seq - 1
  at::Tensor document_offsets;  ///< Pack: int32 [documents + 1] over batch * seq tokens, padding as
                                ///< documents of its own; else undefined
  int64_t max_document_length = 0;
  int64_t num_tokens = 0;   ///< without padding
  int64_t num_targets = 0;  ///< labels that count
  int64_t size() const { return input_ids.size(0); }
};

}  // namespace ddp
