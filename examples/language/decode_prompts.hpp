// SPDX-License-Identifier: Apache-2.0
// Decodes a model's answers to the prompts of an evaluation set and counts the correct ones.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ddp/amp/amp.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/fields.hpp"
#include "models/causal_lm.hpp"
#include "models/tokens/token_dataset.hpp"

namespace examples {

struct DecodeSettings {
  int64_t num_prompts = 0;
  int64_t max_new_tokens = 256;
  int64_t batch_size = 16;
  int64_t show = 3;
  double temperature = 0;  ///< of run.mode=chat, as top_k and seed
  int64_t top_k = 0;
  int64_t seed = 0;
};
void describe_fields(DecodeSettings& settings, ddp::FieldVisitor& visitor);

struct DecodeResult {
  int64_t num_prompts = 0;      ///< decoded on all ranks
  int64_t num_too_long = 0;     ///< skipped: prompt and answer exceed the model's positions
  int64_t num_equal = 0;        ///< answers equal to the reference, token by token
  int64_t num_calls = 0;        ///< references with an API call
  int64_t num_undue_calls = 0;  ///< answers with a call whose reference has none
  int64_t num_equal_calls = 0;  ///< answers with the reference's call
  int64_t num_equal_names = 0;  ///< answers that call the reference's API
  std::string shown;            ///< rank 0's first few, with prompt, answer and reference
  std::string stopped_by;  ///< StopPoll::stop_reason() of a stop; the numbers are then of no use

  /// "12 of 58 (20.69 %) API calls equal the reference, …".
  std::string to_string() const;
};

/// Throws DataError if the data have no answers.
void require_prompts(const models::TokenDataset& dataset, const DecodeSettings& settings);

/// Decodes the first `num_prompts` answers of the documents greedily, spread over the ranks. Each
/// prompt is the conversation before the answer, as in the data. Collective; the result is the same
/// on all ranks except `shown`. Throws DataError if the data have no answers. If a rank was asked
/// to stop, all ranks stop between two tokens.
DecodeResult decode_prompts(models::CausalLm& model, const models::TokenDataset& dataset,
                            const DecodeSettings& settings, const ddp::AmpOptions& amp,
                            const ddp::Context& ctx, double stop_check_seconds);

/// A call of an API as a chat model writes it: "<functioncall> {"name": …, "arguments": …}".
struct ApiCall {
  std::string name;       ///< empty if the text after <functioncall> is no JSON object
  std::string canonical;  ///< equal texts mean equal calls: sorted keys, no extra white space
};

/// Returns the call in a model's answer, or nullopt if there is none. The arguments may be a JSON
/// object, a string that holds one, or (as in the Glaive data) such a string in single quotes. Text
/// that is not JSON is compared without its white space.
std::optional<ApiCall> find_api_call(const std::string& answer);

}  // namespace examples
