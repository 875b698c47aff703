// SPDX-License-Identifier: Apache-2.0
#include "models/causal_lm.hpp"

#include <torch/torch.h>

#include <algorithm>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "decoder_parts.hpp"
#include "models/eval_scope.hpp"

namespace models {

torch::Tensor CausalLm::logits(const torch::Tensor& hidden) const {
  const auto& weight = head_weight();
  if (torch::GradMode::is_enabled() && weight.requires_grad()) {
    return torch::linear(hidden, weight);
  }
  return torch::linear(hidden, ddp::ops::padded_rows(weight)).narrow(-1, 0, weight.size(0));
}

LmOutput CausalLm::forward(const TokenInput& input, const torch::Tensor& labels) {
  const auto hidden = hidden_states(input);
  const auto result = ddp::ops::linear_cross_entropy(
      hidden.reshape({-1, hidden.size(-1)}), head_weight(), labels.reshape({-1}), loss_options());
  return {result.loss_sum, result.num_correct};
}

namespace {

/// Refuses prompts without a next token.
int64_t checked_length(const std::vector<int64_t>& prompt, const CausalLm& model) {
  const auto length = static_cast<int64_t>(prompt.size());
  if (prompt.empty()) {
    detail::refuse("generation needs a prompt of at least one token");
  }
  if (length >= model.max_positions()) {
    detail::refuse("the prompt has ", length, " tokens, but the model has ", model.max_positions(),
                   " positions, so that none is left for an answer; fix: a shorter prompt");
  }
  return length;
}

/// Logits [..., tokens] of the ids that generation may choose.
torch::Tensor next_logits(const CausalLm& model, const torch::Tensor& hidden) {
  const auto logits = model.logits(hidden);
  const int64_t num_tokens = model.computation().num_tokens;
  return num_tokens > 0 ? logits.narrow(-1, 0, std::min(num_tokens, logits.size(-1))) : logits;
}

bool ends(int64_t token, const std::vector<int64_t>& end_tokens) {
  return std::find(end_tokens.begin(), end_tokens.end(), token) != end_tokens.end();
}

/// `choose` maps the last position's logits [vocab] to the next token.
template <typename Choose>
std::vector<int64_t> generate(CausalLm& model, const std::vector<int64_t>& prompt,
                              int64_t max_new_tokens, const std::vector<int64_t>& end_tokens,
                              const StopCheck& stops, const Choose& choose,
                              const std::function<void(int64_t)>& on_token = {}) {
  const int64_t length = checked_length(prompt, model);
  const torch::NoGradGuard no_grad;
  const EvalScope eval(model);
  const auto device = model.head_weight().device();
  const int64_t total = std::min(length + max_new_tokens, model.max_positions());
  auto cache = model.make_cache(1, std::max(total, length));
  auto ids = torch::tensor(prompt, torch::kLong).unsqueeze(0).to(device);
  std::vector<int64_t> generated;
  for (int64_t position = length; position < total; ++position) {
    const auto hidden = model.hidden_states({.input_ids = ids}, &cache);
    const int64_t token =
        choose(next_logits(model, hidden.select(1, hidden.size(1) - 1)).squeeze(0));
    generated.push_back(token);
    if (on_token) {
      on_token(token);
    }
    if (ends(token, end_tokens) || (stops && stops())) {
      break;
    }
    ids = torch::full({1, 1}, token, ids.options());
  }
  return generated;
}

/// A batch of prompts; the shorter ones are padded at their end.
struct PromptBatch {
  torch::Tensor ids;      // [batch, longest]
  torch::Tensor lengths;  // [batch]
  int64_t longest = 0;
};

PromptBatch stack_prompts(const std::vector<std::vector<int64_t>>& prompts, const CausalLm& model) {
  PromptBatch batch;
  std::vector<int64_t> lengths;
  for (const auto& prompt : prompts) {
    lengths.push_back(checked_length(prompt, model));
    batch.longest = std::max(batch.longest, lengths.back());
  }
  const auto rows = static_cast<int64_t>(prompts.size());
  auto ids = torch::zeros({rows, batch.longest}, torch::kLong);
  for (int64_t row = 0; row < rows; ++row) {
    const auto& prompt = prompts[static_cast<std::size_t>(row)];
    std::copy(prompt.begin(), prompt.end(), ids.mutable_data_ptr<int64_t>() + row * batch.longest);
  }
  const auto device = model.head_weight().device();
  batch.ids = ids.to(device);
  batch.lengths = torch::tensor(lengths, torch::kLong).to(device);
  return batch;
}

/// Appends `tokens` to the answers that have not ended; returns true while one is unfinished.
bool append_tokens(const torch::Tensor& tokens, const std::vector<int64_t>& end_tokens,
                   std::vector<bool>& ended, std::vector<std::vector<int64_t>>& answers) {
  const auto host = tokens.cpu();
  bool goes_on = false;
  for (std::size_t row = 0; row < answers.size(); ++row) {
    if (ended[row]) {
      continue;
    }
    const int64_t token = host.const_data_ptr<int64_t>()[row];
    answers[row].push_back(token);
    ended[row] = ends(token, end_tokens);
    goes_on = goes_on || !ended[row];
  }
  return goes_on;
}

}  // namespace

std::vector<int64_t> generate_greedy(CausalLm& model, const std::vector<int64_t>& prompt,
                                     int64_t max_new_tokens, const std::vector<int64_t>& end_tokens,
                                     const StopCheck& stops) {
  return generate(model, prompt, max_new_tokens, end_tokens, stops,
                  [](const torch::Tensor& logits) { return logits.argmax().item<int64_t>(); });
}

std::vector<std::vector<int64_t>> generate_greedy(CausalLm& model,
                                                  const std::vector<std::vector<int64_t>>& prompts,
                                                  int64_t max_new_tokens,
                                                  const std::vector<int64_t>& end_tokens,
                                                  const StopCheck& stops) {
  std::vector<std::vector<int64_t>> answers(prompts.size());
  if (prompts.empty() || max_new_tokens <= 0) {
    return answers;
  }
  const torch::NoGradGuard no_grad;
  const EvalScope eval(model);
  const auto batch = stack_prompts(prompts, model);
  const int64_t total = batch.longest + max_new_tokens;
  if (total > model.max_positions()) {
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      answers[i] = generate_greedy(model, prompts[i], max_new_tokens, end_tokens, stops);
    }
    return answers;
  }
  auto cache = model.make_cache(batch.ids.size(0), total);
  // Padding follows each prompt, so a causal forward needs no mask. Later tokens mask it out.
  auto hidden = model.hidden_states({.input_ids = batch.ids}, &cache);
  const auto last = (batch.lengths - 1).view({-1, 1, 1}).expand({-1, 1, hidden.size(2)});
  hidden = hidden.gather(1, last);
  const auto columns = torch::arange(total, batch.lengths.options()).unsqueeze(0);
  const auto readable =
      columns.lt(batch.lengths.unsqueeze(1)).logical_or_(columns.ge(batch.longest));
  std::vector<bool> ended(prompts.size(), false);
  for (int64_t step = 0; step < max_new_tokens; ++step) {
    const auto tokens = next_logits(model, hidden.select(1, 0)).argmax(1);
    if (!append_tokens(tokens, end_tokens, ended, answers) || step + 1 == max_new_tokens ||
        (stops && stops())) {
      break;
    }
    hidden = model.hidden_states({.input_ids = tokens.unsqueeze(1),
                                  .position_ids = (batch.lengths + step).unsqueeze(1),
                                  .key_mask = readable.narrow(1, 0, cache.length + 1)},
                                 &cache);
  }
  return answers;
}

std::vector<int64_t> generate_sampled(CausalLm& model, const std::vector<int64_t>& prompt,
                                      int64_t max_new_tokens,
                                      const std::vector<int64_t>& end_tokens,
                                      const SamplingOptions& options, const StopCheck& stops) {
  // Drawing on the CPU gives the same text on every device that computes the same logits.
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  const auto draw = [&](const torch::Tensor& logits) {
    if (options.temperature <= 0) {
      return logits.argmax().item<int64_t>();
    }
    auto scores = logits.to(torch::kCPU, torch::kFloat) / std::max(options.temperature, 1e-6);
    if (options.top_k > 0 && options.top_k < scores.numel()) {
      const auto smallest = std::get<0>(scores.topk(options.top_k)).min();
      scores.masked_fill_(scores < smallest, -std::numeric_limits<float>::infinity());
    }
    return scores.softmax(0).multinomial(1, false, generator).item<int64_t>();
  };
  return generate(model, prompt, max_new_tokens, end_tokens, stops, draw, options.on_token);
}

}  // namespace models
