// SPDX-License-Identifier: Apache-2.0
#include "models/tokens/token_masking.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/data/sample_rng.hpp"

namespace models {
namespace {

using ddp::concat;
using ddp::DataError;
using ddp::FieldVisitor;
using ddp::SampleRng;
using ddp::SettingsError;

constexpr const char* kFix = "; fix: prepare the data with prepare_text.py --tokenizer wordpiece";

// Keeps these draws apart from others of the same seed.
constexpr uint64_t kStream = 0x6d61736b;

int64_t special_id(const Vocabulary& vocabulary, const char* token) {
  const auto id = vocabulary.find(token);
  if (!id || !vocabulary.is_special(*id)) {
    throw DataError(concat(vocabulary.path(), " has no special token ", token, kFix));
  }
  return *id;
}

}  // namespace

void describe_fields(MaskingOptions& o, FieldVisitor& v) {
  v.field({.name = "masked_share",
           .doc = "Share of each row's ordinary tokens that are targets.",
           .min = 0.001,
           .max = 0.9},
          o.masked_share);
  v.field({.name = "full_head",
           .doc = "Run the head on all positions instead of on the targets alone. The loss is the "
                  "same."},
          o.full_head);
  v.field({.name = "seed", .doc = "Seed of the masks."}, o.seed);
}

TokenMasking::TokenMasking(const Vocabulary& vocabulary, const MaskingOptions& options)
    : options_(options) {
  if (!(options.masked_share > 0 && options.masked_share < 1)) {
    throw SettingsError(concat("masking.masked_share=", options.masked_share,
                               " must lie between 0 and 1; fix: 0.15 as in BERT"));
  }
  mask_id_ = static_cast<int32_t>(special_id(vocabulary, "[MASK]"));
  // Masks must neither hide these tokens nor put them in place of others.
  for (const char* token : {"[CLS]", "[SEP]", "[UNK]"}) {
    special_id(vocabulary, token);
  }
  if (vocabulary.bytes(0) != "[PAD]" || !vocabulary.is_special(0)) {
    throw DataError(vocabulary.path() + ": id 0, which fills rows, is not the special token [PAD]" +
                    kFix);
  }
  is_ordinary_.resize(static_cast<std::size_t>(vocabulary.size()));
  for (int64_t id = 0; id < vocabulary.size(); ++id) {
    if (!vocabulary.is_special(id) && !vocabulary.bytes(id).empty()) {
      is_ordinary_[static_cast<std::size_t>(id)] = true;
      ordinary_ids_.push_back(static_cast<int32_t>(id));
    }
  }
  if (ordinary_ids_.empty()) {
    throw DataError(vocabulary.path() + " holds special tokens alone" + kFix);
  }
}

int64_t TokenMasking::max_targets(int64_t length) const {
  return std::max<int64_t>(1, std::llround(options_.masked_share * static_cast<double>(length)));
}

void TokenMasking::mask(TokenExample& example) const {
  auto& ids = example.input_ids;
  example.labels.assign(ids.size(), kIgnoredLabel);
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (is_ordinary_[static_cast<std::size_t>(ids[i])]) {
      places.push_back(i);
    }
  }
  const auto ordinary = static_cast<int64_t>(places.size());
  const auto count = static_cast<std::size_t>(std::min(ordinary, max_targets(ordinary)));
  SampleRng rng(static_cast<uint64_t>(options_.seed) ^ kStream,
                static_cast<uint64_t>(example.epoch), static_cast<uint64_t>(example.index));
  // The first `count` steps of a shuffle.
  for (std::size_t i = 0; i < count; ++i) {
    std::swap(places[i], places[i + rng.below(static_cast<uint32_t>(places.size() - i))]);
    auto& id = ids[places[i]];
    example.labels[places[i]] = id;
    const float kind = rng.uniform();
    if (kind < 0.8F) {
      id = mask_id_;
    } else if (kind < 0.9F) {
      id = ordinary_ids_[rng.below(static_cast<uint32_t>(ordinary_ids_.size()))];
    }
  }
}

}  // namespace models
