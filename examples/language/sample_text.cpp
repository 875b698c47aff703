// SPDX-License-Identifier: Apache-2.0
#include "language/sample_text.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <string_view>

#include "ddp/amp/amp.hpp"
#include "ddp/core/error.hpp"

namespace examples {
namespace {

constexpr std::size_t kLongestToken = 64;  // in bytes; longer ones are never needed

}  // namespace

void describe_fields(SampleSettings& s, ddp::FieldVisitor& v) {
  v.field(
      {.name = "num_samples", .doc = "Number of texts to print after training. 0: none.", .min = 0},
      s.num_samples);
  v.field({.name = "prompt",
           .doc = "Start of the texts. It is split into the longest tokens of the vocabulary that "
                  "fit; a BPE tokenizer may split it differently. Empty: a newline."},
          s.prompt);
  v.field({.name = "max_new_tokens",
           .doc = "Longest text; it ends at the model's last position.",
           .unit = "tokens",
           .min = 1,
           .max = 1 << 20},
          s.max_new_tokens);
  v.field({.name = "temperature",
           .doc = "Divisor of the logits. Below 1, likely tokens become likelier.",
           .min = 1e-3,
           .max = 100},
          s.temperature);
  v.field({.name = "top_k", .doc = "Draw from the k likeliest tokens. 0: from all.", .min = 0},
          s.top_k);
  v.field({.name = "seed", .doc = "Seed for the draws.", .min = 0}, s.seed);
}

std::vector<int64_t> encode_longest(const models::Vocabulary& vocabulary, const std::string& text) {
  std::vector<int64_t> ids;
  std::string_view rest = text;
  while (!rest.empty()) {
    auto length = std::min(rest.size(), kLongestToken);
    auto id = vocabulary.find(rest.substr(0, length));
    while (!id && length > 1) {
      id = vocabulary.find(rest.substr(0, --length));
    }
    if (!id) {
      throw ddp::SettingsError(ddp::concat("sample.prompt: no token of ", vocabulary.path(),
                                           " begins \"", models::valid_utf8(rest.substr(0, 8)),
                                           "\"; fix: a prompt of characters that the data have"));
    }
    ids.push_back(*id);
    rest.remove_prefix(length);
  }
  return ids;
}

std::vector<int64_t> prompt_ids(const models::Vocabulary& vocabulary,
                                const SampleSettings& settings, int64_t max_positions) {
  if (settings.prompt.empty()) {
    return {vocabulary.find("\n").value_or(0)};
  }
  auto ids = encode_longest(vocabulary, settings.prompt);
  if (static_cast<int64_t>(ids.size()) >= max_positions) {
    throw ddp::SettingsError(ddp::concat("sample.prompt has ", ids.size(),
                                         " tokens, but the model has ", max_positions,
                                         " positions; fix: a shorter prompt"));
  }
  return ids;
}

std::string sample_text(models::CausalLm& model, const models::Vocabulary& vocabulary,
                        const SampleSettings& settings, const ddp::AmpOptions& amp, int64_t index,
                        const models::StopCheck& stops) {
  torch::NoGradGuard no_grad;
  ddp::Autocast autocast(amp);
  auto ids = prompt_ids(vocabulary, settings, model.max_positions());
  const auto more = models::generate_sampled(model, ids, settings.max_new_tokens,
                                             vocabulary.tokenizer().end_tokens(),
                                             {.temperature = settings.temperature,
                                              .top_k = settings.top_k,
                                              .seed = static_cast<uint64_t>(settings.seed + index)},
                                             stops);
  ids.insert(ids.end(), more.begin(), more.end());
  return models::valid_utf8(vocabulary.decode(ids));
}

}  // namespace examples
