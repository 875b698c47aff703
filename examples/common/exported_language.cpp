// SPDX-License-Identifier: Apache-2.0
#include "common/exported_language.hpp"

#include <torch/torch.h>

#include "ddp/core/error.hpp"
#include "ddp/ops/vision.hpp"

namespace examples {
namespace {

using ddp::concat;

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
  const auto num_counted = flat_labels.ne(models::kIgnoredLabel).sum();
  return {.loss_sum = result.loss * num_counted, .num_correct = result.num_correct};
}

}  // namespace

WrappedLanguageModel wrap_exported(const ddp::Context& ctx, const ddp::Config& cfg,
                                   const ExportedNet& module, const ExportedSettings& settings,
                                   int64_t vocab_size) {
  const auto model = std::make_shared<ddp::DistributedDataParallel<ExportedNet>>(
      module, ctx.communicator(), cfg.ddp);
  const auto forward = [model, settings, vocab_size](const models::TokenInput& input,
                                                     const at::Tensor& labels) -> models::LmOutput {
    if (settings.loss == LossKind::InGraph) {
      const auto mean = loss_in_graph(model->forward(input.input_ids, labels), settings.output);
      return {.loss_sum = mean * labels.ne(models::kIgnoredLabel).sum(), .num_correct = {}};
    }
    return next_token_loss(select_output(model->forward(input.input_ids), settings.output), labels,
                           vocab_size);
  };
  return {.model = model,
          .module = module.ptr(),
          .forward = forward,
          .dtype = module->parameters().front().scalar_type()};
}

}  // namespace examples
