// SPDX-License-Identifier: Apache-2.0
#include "exported/exported_language.hpp"

#include <torch/torch.h>

#include "common/sample_trainer.hpp"
#include "ddp/core/error.hpp"
#include "ddp/ops/vision.hpp"
#include "tensors/model_call.hpp"

namespace examples {
namespace {

using ddp::concat;

// The sum of the losses of labels that count. Without any the mean is NaN, and the sum 0.
at::Tensor loss_sum(const at::Tensor& mean, const at::Tensor& labels) {
  const auto num_counted = labels.ne(models::kIgnoredLabel).sum();
  const auto sum = mean * num_counted;
  return torch::where(num_counted.gt(0), sum, torch::zeros_like(sum));
}

models::LmOutput next_token_loss(const at::Tensor& logits, const at::Tensor& labels,
                                 int64_t vocab_size) {
  if (logits.dim() != 3 || logits.size(0) != labels.size(0) || logits.size(1) != labels.size(1)) {
    throw ddp::SettingsError(
        concat("model.loss=cross_entropy of tokens needs an output [batch, length, vocabulary], "
               "but it is ",
               logits.sizes(), " for tokens ", labels.sizes(),
               "; fix: choose another output by model.output"));
  }
  if (logits.size(2) < vocab_size) {
    throw ddp::DataError(concat("the data has a vocabulary of ", vocab_size,
                                " tokens, but the output of model.path has ", logits.size(2),
                                "; fix: export a model for this vocabulary"));
  }
  const auto flat_labels = labels.reshape(-1);
  const auto result = ddp::ops::cross_entropy(logits.reshape({-1, logits.size(2)}), flat_labels,
                                              {.ignore_index = models::kIgnoredLabel});
  return {.loss_sum = loss_sum(result.loss, flat_labels), .num_correct = result.num_correct};
}

template <typename Net>
models::LmOutput loss_of(Net& net, const at::Tensor& ids, const at::Tensor& labels,
                         const ExportedSettings& settings, int64_t vocab_size) {
  if (settings.loss == LossKind::InGraph) {
    const auto mean = loss_in_graph(net.forward(ids, labels), settings.output);
    return {.loss_sum = loss_sum(mean, labels), .num_correct = {}};
  }
  try {
    return next_token_loss(select_output(net.forward(ids), settings.output), labels, vocab_size);
  } catch (const ddp::MissingArgumentError& error) {
    throw with_target_hint(error);
  }
}

// Logits of another size and lengths out of range show with id 0. An id without an embedding is an
// error that a GPU's program does not survive.
void rehearse_tokens(const ddp::Context& ctx, const ddp::Config& cfg,
                     ddp::ExportedModuleImpl& module, const ExportedSettings& settings,
                     const TokenData& data) {
  const auto vocab_size = data.train->tokenizer().vocab_size;
  rehearse_evaluation(ctx, cfg, module, data.eval->size(), [&](int64_t size) {
    const auto ids = torch::zeros({size, data.eval->options().max_seq_len},
                                  torch::TensorOptions(ctx.device()).dtype(torch::kInt64));
    loss_of(module, ids, ids, settings, vocab_size);
    if (!ctx.device().is_cpu()) {
      return;
    }
    try {
      loss_of(module, ids + (vocab_size - 1), ids, settings, vocab_size);
    } catch (const c10::IndexError& error) {
      throw ddp::DataError(concat("model.path does not take the id ", vocab_size - 1,
                                  " of the data's vocabulary: ", error.what_without_backtrace(),
                                  "; fix: export a model for ", vocab_size, " ids"));
    }
  });
  check_training_batches(ctx, cfg, data.train->size(), [&](int64_t size) {
    const auto ids = torch::zeros({size, data.train->options().max_seq_len},
                                  torch::TensorOptions(ctx.device()).dtype(torch::kInt64));
    std::vector<c10::IValue> arguments{ids};
    if (settings.loss == LossKind::InGraph) {
      arguments.emplace_back(ids);
    }
    module.check_call(arguments);
  });
}

}  // namespace

WrappedLanguageModel wrap_exported(const ddp::Context& ctx, const ddp::Config& cfg,
                                   ddp::ExportedModule module, const ExportedSettings& settings,
                                   const TokenData& data) {
  rehearse_tokens(ctx, cfg, *module, settings, data);
  const auto model = std::make_shared<ddp::DistributedDataParallel<ddp::ExportedModule>>(
      module, ctx.communicator(), cfg.ddp);
  const auto vocab_size = data.train->tokenizer().vocab_size;
  return {
      .model = model,
      .module = module.ptr(),
      .forward =
          [model, settings, vocab_size](const models::TokenInput& input, const at::Tensor& labels) {
            return loss_of(*model, input.input_ids, labels, settings, vocab_size);
          },
      .dtype = module->parameters().front().scalar_type()};
}

}  // namespace examples
