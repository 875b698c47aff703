// SPDX-License-Identifier: Apache-2.0
// Answers of a model to the prompts of an evaluation set, and how many are right.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/amp/amp_options.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/fields.hpp"
#include "ddp/data/token_dataset.hpp"
#include "models/causal_lm.hpp"

namespace examples {

struct DecodeSettings {
  int64_t num_prompts = 0;
  int64_t max_new_tokens = 256;
  int64_t batch_size = 16;
  int64_t show = 3;
};
void describe_fields(DecodeSettings& settings, ddp::FieldVisitor& visitor);

struct DecodeResult {
  int64_t num_prompts = 0;      ///< decoded, all ranks
  int64_t num_too_long = 0;     ///< left out: prompt and answer exceed the model's positions
  int64_t num_equal = 0;        ///< the answer is the reference, token by token
  int64_t num_calls = 0;        ///< references that call an API
  int64_t num_undue_calls = 0;  ///< answers that call one where the reference does not
  int64_t num_equal_calls = 0;  ///< of them, answers with the same call
  int64_t num_equal_names = 0;  ///< of them, answers that call the same API
  std::string shown;            ///< rank 0's first few, prompt, answer and reference

  /// "12 of 58 (20.69 %) API calls equal the reference, …".
  std::string to_string() const;
};

/// Throws DataError where the data have no answers to give.
void require_prompts(const ddp::TokenDataset& dataset, const DecodeSettings& settings);

/// Decodes the first `num_prompts` answers of the documents greedily, each behind the conversation
/// before it as the data have it, spread over the ranks.
/// Collective; the result is the same on all ranks but for `shown`. Throws DataError where the data
/// have no answers to give.
DecodeResult decode_prompts(models::CausalLm& model, const ddp::TokenDataset& dataset,
                            const DecodeSettings& settings, const ddp::AmpOptions& amp,
                            const ddp::Context& ctx);

}  // namespace examples
