// SPDX-License-Identifier: Apache-2.0
// Answers prompts of token ids on standard input. tools/chat.py turns text into ids and back.
//
//   program: {"ready": {"tokens": "data/chat-sample", "model": ""}}
//   partner: [1, 17, 5]
//   program: {"token": 42}   for each new token
//   program: {"end": "end_token"}, or "length" if the answer was cut
//   program: {"error": "…"}  instead, for a prompt that cannot be answered
#pragma once

#include <cstdint>
#include <string>

#include "ddp/amp/amp.hpp"
#include "ddp/train/config.hpp"
#include "language/language_options.hpp"
#include "models/causal_lm.hpp"
#include "models/tokens/token_dataset.hpp"

namespace examples {

struct AnswerOptions {
  int64_t max_new_tokens = 256;
  double temperature = 0;  ///< 0: greedy
  int64_t top_k = 0;       ///< 0: all
  int64_t seed = 0;        ///< of the first answer; each answer adds 1
};

/// Throws SettingsError for a job of several ranks, and if the settings name no trained weights.
void require_prompt_settings(const ddp::Context& ctx, const ddp::Config& cfg,
                             const LanguageModelSettings& model, const std::string& adapter = "");

/// Reads a prompt per line and writes its answer to standard output, until the end of the input or
/// a stop request. Then it returns. A prompt that does not fit the model is answered by an error.
/// `data` has the vocabulary of the ids; the first line names its folder and that of `settings`.
void answer_prompts(models::CausalLm& model, const models::TokenDataset& data,
                    const LanguageModelSettings& settings, const AnswerOptions& options,
                    const ddp::AmpOptions& amp);

}  // namespace examples
