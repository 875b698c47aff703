// SPDX-License-Identifier: Apache-2.0
// Masked language modelling (Devlin et al., arXiv:1810.04805): hides some tokens of a row and makes
// them the targets.
//
//   models::TokenCollate collate(*dataset,
//                             std::make_shared<models::TokenMasking>(dataset->vocabulary(),
//                             options));
#pragma once

#include <cstdint>
#include <vector>

#include "ddp/core/fields.hpp"
#include "models/tokens/token_dataset.hpp"

namespace models {

struct MaskingOptions {
  double masked_share = 0.15;  ///< share of a row's ordinary tokens that become targets
  /// Head and loss cover all positions of a batch. Off: only the targets' positions, which are
  /// gathered first; the loss is the same.
  bool full_head = false;
  int64_t seed = 0;
};
void describe_fields(MaskingOptions& options, ddp::FieldVisitor& visitor);

/// Draws from (seed, epoch, row index) alone, so a row's mask is the same on any number of ranks,
/// in any order and in a resumed run.
class TokenMasking {
 public:
  /// Throws SettingsError for an invalid share, DataError if "[MASK]", "[CLS]", "[SEP]" or "[UNK]"
  /// is no special token of the vocabulary, if "[PAD]" is not id 0, or if no id is ordinary.
  TokenMasking(const Vocabulary& vocabulary, const MaskingOptions& options);

  /// Replaces the labels by those of the masked row. round(masked_share * ordinary tokens) of the
  /// ordinary tokens, at least one, keep their id as label. 80 % of these become [MASK] in the
  /// input, 10 % a random ordinary id, 10 % stay. All other labels become kIgnoredLabel. Special
  /// tokens are never targets.
  void mask(TokenExample& example) const;

  /// Upper bound of targets in a row of `length` tokens.
  int64_t max_targets(int64_t length) const;
  const MaskingOptions& options() const { return options_; }  ///< as given to the constructor

 private:
  MaskingOptions options_;
  int32_t mask_id_ = 0;
  std::vector<int32_t> ordinary_ids_;  // ascending
  std::vector<bool> is_ordinary_;      // by id
};

}  // namespace models
