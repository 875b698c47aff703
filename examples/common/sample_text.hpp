// SPDX-License-Identifier: Apache-2.0
// Text that a model writes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/amp/amp_options.hpp"
#include "ddp/core/fields.hpp"
#include "ddp/data/token_file.hpp"
#include "models/causal_lm.hpp"

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

/// Ids whose bytes are `text`, each the longest that fits: the same text to a model, though not
/// always the cut that the tokenizer itself makes. Throws SettingsError where no token has the
/// bytes.
std::vector<int64_t> encode_longest(const ddp::Vocabulary& vocabulary, const std::string& text);

/// Ids of settings.prompt; where that is empty of a line end, or of id 0 where the data have none.
std::vector<int64_t> prompt_ids(const ddp::Vocabulary& vocabulary, const SampleSettings& settings);

/// Sample number `index`: the prompt and what the model makes of it, up to an end token of the
/// vocabulary, settings.max_new_tokens or the model's last position.
std::string sample_text(models::CausalLm& model, const ddp::Vocabulary& vocabulary,
                        const SampleSettings& settings, const ddp::AmpOptions& amp, int64_t index);

}  // namespace examples
