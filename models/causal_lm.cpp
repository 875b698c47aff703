// SPDX-License-Identifier: Apache-2.0
#include "models/causal_lm.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <stdexcept>

#include "ddp/ops/linear_cross_entropy.hpp"

namespace models {

torch::Tensor CausalLm::logits(const torch::Tensor& hidden) const {
  const auto& weight = head_weight();
  if (torch::GradMode::is_enabled() && weight.requires_grad()) {
    return torch::linear(hidden, weight);
  }
  return torch::linear(hidden, ddp::ops::padded_rows(weight)).narrow(-1, 0, weight.size(0));
}

LmOutput CausalLm::forward(const TokenInput& input, const torch::Tensor& labels) {
  // A `.to()` since the construction took the padding away. The handle shares the parameter.
  auto head = head_weight();
  ddp::ops::pad_rows(head);
  const auto hidden = hidden_states(input);
  const auto result = ddp::ops::linear_cross_entropy(
      hidden.reshape({-1, hidden.size(-1)}), head, labels.reshape({-1}),
      {.chunk_tokens = computation_.loss_chunk_tokens});
  return {result.loss_sum, result.num_correct};
}

double CausalLm::matrix_flops_per_token() const {
  double flops = 0;
  for (const auto& item : named_parameters()) {
    if (item.value().dim() == 2 && is_matrix_product(item.key())) {
      flops +=
          (item.value().requires_grad() ? 6.0 : 4.0) * static_cast<double>(item.value().numel());
    }
  }
  return flops;
}

namespace {

/// Evaluation mode while it lives.
class EvalScope {
 public:
  explicit EvalScope(torch::nn::Module& module)
      : module_(module), was_training_(module.is_training()) {
    module_.eval();
  }
  ~EvalScope() { module_.train(was_training_); }
  EvalScope(const EvalScope&) = delete;
  EvalScope& operator=(const EvalScope&) = delete;

 private:
  torch::nn::Module& module_;
  bool was_training_;
};

/// `choose` maps the last position's logits [vocab] to the next token.
template <typename Choose>
std::vector<int64_t> generate(CausalLm& model, const std::vector<int64_t>& prompt,
                              int64_t max_new_tokens, const std::vector<int64_t>& end_tokens,
                              const Choose& choose) {
  if (prompt.empty()) {
    throw std::invalid_argument("generation needs a prompt of at least one token");
  }
  const torch::NoGradGuard no_grad;
  const EvalScope eval(model);
  const auto device = model.head_weight().device();
  const auto length = static_cast<int64_t>(prompt.size());
  const int64_t total = std::min(length + max_new_tokens, model.max_positions());
  auto cache = model.make_cache(1, std::max(total, length));
  auto ids = torch::tensor(prompt, torch::kLong).unsqueeze(0).to(device);
  std::vector<int64_t> generated;
  for (int64_t position = length; position < total; ++position) {
    const auto hidden = model.hidden_states({.input_ids = ids}, &cache);
    const int64_t token = choose(model.logits(hidden.select(1, hidden.size(1) - 1)).squeeze(0));
    generated.push_back(token);
    if (std::find(end_tokens.begin(), end_tokens.end(), token) != end_tokens.end()) {
      break;
    }
    ids = torch::full({1, 1}, token, ids.options());
  }
  return generated;
}

}  // namespace

std::vector<int64_t> generate_greedy(CausalLm& model, const std::vector<int64_t>& prompt,
                                     int64_t max_new_tokens,
                                     const std::vector<int64_t>& end_tokens) {
  return generate(model, prompt, max_new_tokens, end_tokens,
                  [](const torch::Tensor& logits) { return logits.argmax().item<int64_t>(); });
}

std::vector<int64_t> generate_sampled(CausalLm& model, const std::vector<int64_t>& prompt,
                                      int64_t max_new_tokens,
                                      const std::vector<int64_t>& end_tokens,
                                      const SamplingOptions& options) {
  // Drawn on the CPU: the same text on every device that gives the same logits.
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  return generate(model, prompt, max_new_tokens, end_tokens, [&](const torch::Tensor& logits) {
    auto scores = logits.to(torch::kCPU, torch::kFloat) / std::max(options.temperature, 1e-6);
    if (options.top_k > 0 && options.top_k < scores.numel()) {
      const auto smallest = std::get<0>(scores.topk(options.top_k)).min();
      scores.masked_fill_(scores < smallest, -std::numeric_limits<float>::infinity());
    }
    return scores.softmax(0).multinomial(1, false, generator).item<int64_t>();
  });
}

}  // namespace models
