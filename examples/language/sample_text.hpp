// SPDX-License-Identifier: Apache-2.0
// Generates text with a model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/amp/amp.hpp"
#include "ddp/core/fields.hpp"
#include "models/causal_lm.hpp"
#include "models/tokens/token_dataset.hpp"

namespace examples {

struct SampleSettings {
  int64_t num_samples = 1;
  std::string prompt = "";
  int64_t max_new_tokens = 500;
  double temperature = 0.8;
  int64_t top_k = 200;
  int64_t seed = 0;
};
void describe_fields(SampleSettings& settings, ddp::FieldVisitor& visitor);

/// Encodes `text` greedily, with the longest token that fits at each place. The text is the same,
/// but the tokenizer may split it differently. Throws SettingsError if no token fits.
std::vector<int64_t> encode_longest(const models::Vocabulary& vocabulary, const std::string& text);

/// Ids of settings.prompt. An empty prompt becomes a line end, or id 0 if the data have no line
/// end. Throws SettingsError if it leaves none of the model's positions for a continuation.
std::vector<int64_t> prompt_ids(const models::Vocabulary& vocabulary,
                                const SampleSettings& settings, int64_t max_positions);

/// Returns sample number `index`: the prompt and the model's continuation. It ends at an end token
/// of the vocabulary, settings.max_new_tokens, the model's last position, or if `stops` says so.
std::string sample_text(models::CausalLm& model, const models::Vocabulary& vocabulary,
                        const SampleSettings& settings, const ddp::AmpOptions& amp, int64_t index,
                        const models::StopCheck& stops = {});

}  // namespace examples
