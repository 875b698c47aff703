// SPDX-License-Identifier: Apache-2.0
#include "common/sample_loss.hpp"

#include <torch/torch.h>

#include "ddp/core/error.hpp"

namespace examples {
namespace {

using ddp::concat;

std::vector<int64_t> without_ones(at::IntArrayRef sizes) {
  std::vector<int64_t> result;
  for (const auto size : sizes) {
    if (size != 1) {
      result.push_back(size);
    }
  }
  return result;
}

ddp::ops::CrossEntropyResult cross_entropy(const at::Tensor& output, const at::Tensor& target,
                                           const TargetFacts& facts, double label_smoothing) {
  bool fits = output.dim() == target.dim() + 1 && output.is_floating_point();
  for (int64_t i = 0; fits && i < target.dim(); ++i) {
    fits = target.size(i) == output.size(i == 0 ? 0 : i + 1);
  }
  if (!fits) {
    throw ddp::SettingsError(
        concat("model.loss=cross_entropy needs an output [N, classes, …] for a target [N, …], but "
               "the output is ",
               output.sizes(), " and the target ", target.sizes(),
               "; fix: choose another output by model.output, or another model.loss"));
  }
  const auto num_classes = output.size(1);
  if (num_classes < facts.num_classes) {
    throw ddp::DataError(
        concat("the target has the label ", facts.num_classes - 1, ", but the output has ",
               num_classes, " classes; fix: export a model for ", facts.num_classes, " classes"));
  }
  const auto rows = output.movedim(1, -1).reshape({-1, num_classes});
  const auto labels = target.reshape(-1);
  auto result = ddp::ops::cross_entropy(
      rows, labels, {.label_smoothing = label_smoothing, .ignore_index = kIgnoredTarget});
  if (facts.has_ignored) {
    const auto has_counted = labels.ne(kIgnoredTarget).any();
    result.loss = torch::where(has_counted, result.loss, rows.sum() * 0);
  }
  return result;
}

}  // namespace

const std::vector<std::pair<std::string, LossKind>>& loss_names() {
  static const std::vector<std::pair<std::string, LossKind>> kNames = {
      {"cross_entropy", LossKind::CrossEntropy},
      {"mse", LossKind::Mse},
      {"l1", LossKind::L1},
      {"bce", LossKind::Bce},
      {"in_graph", LossKind::InGraph}};
  return kNames;
}

std::string name_of(LossKind kind) {
  for (const auto& [name, value] : loss_names()) {
    if (value == kind) {
      return name;
    }
  }
  return "";
}

void check_loss_settings(LossKind kind, const ddp::Config& cfg) {
  if (kind == LossKind::CrossEntropy) {
    return;
  }
  const auto loss = "model.loss=" + name_of(kind);
  if (cfg.train.label_smoothing > 0) {
    throw ddp::SettingsError(ddp::concat("train.label_smoothing=", cfg.train.label_smoothing,
                                         " has no effect with ", loss, "; fix: set it to 0"));
  }
  if (cfg.checkpoint.keep_best == ddp::KeepBest::Max) {
    throw ddp::SettingsError("checkpoint.keep_best=max is for an accuracy, which " + loss +
                             " does not have; fix: checkpoint.keep_best=min");
  }
}

TargetFacts check_target(LossKind kind, const at::Tensor& target, const std::string& source) {
  if (kind == LossKind::Bce && target.numel() > 0 &&
      (target.min().item<double>() < 0 || target.max().item<double>() > 1)) {
    throw ddp::DataError(source +
                         ": the target has values outside of 0 to 1, which "
                         "model.loss=bce needs");
  }
  if (kind != LossKind::CrossEntropy) {
    return {};
  }
  if (target.scalar_type() != torch::kInt64 && target.scalar_type() != torch::kInt32) {
    throw ddp::DataError(concat(source, ": the target is ", target.scalar_type(),
                                ", but model.loss=cross_entropy needs labels as int64; fix: save "
                                "labels, or choose another model.loss"));
  }
  const auto ignored = target.eq(kIgnoredTarget);
  const auto wrong = target.lt(0).logical_and(ignored.logical_not());
  if (wrong.any().item<bool>()) {
    throw ddp::DataError(concat(source, ": the target has the label ",
                                target.masked_select(wrong)[0].item<int64_t>(),
                                "; fix: labels from 0, or ", kIgnoredTarget, " to ignore"));
  }
  TargetFacts facts;
  facts.has_ignored = ignored.any().item<bool>();
  facts.num_classes = target.numel() > 0 ? target.max().item<int64_t>() + 1 : 0;
  facts.num_per_sample = target.size(0) > 0 ? target.numel() / target.size(0) : 1;
  return facts;
}

int64_t count_targets(const TargetFacts& facts, const at::Tensor& target) {
  return facts.has_ignored ? target.ne(kIgnoredTarget).sum().item<int64_t>()
                           : target.size(0) * facts.num_per_sample;
}

ddp::ops::CrossEntropyResult sample_loss(LossKind kind, const at::Tensor& output,
                                         const at::Tensor& target, const TargetFacts& facts,
                                         double label_smoothing) {
  if (kind == LossKind::CrossEntropy) {
    return cross_entropy(output, target, facts, label_smoothing);
  }
  if (without_ones(output.sizes()) != without_ones(target.sizes())) {
    throw ddp::SettingsError(concat(
        "model.loss=", name_of(kind), " needs an output of the target's shape, but the output is ",
        output.sizes(), " and the target ", target.sizes(),
        "; fix: choose another output by model.output, or another model.loss"));
  }
  // float32 at least: a loss of bf16 would have 8 bits.
  const auto wide = at::promote_types(output.scalar_type(), torch::kFloat32);
  const auto prediction = output.to(wide);
  const auto wanted = target.to(wide).reshape(output.sizes());
  const auto loss = kind == LossKind::Mse ? torch::mse_loss(prediction, wanted)
                    : kind == LossKind::L1
                        ? torch::l1_loss(prediction, wanted)
                        : torch::binary_cross_entropy_with_logits(prediction, wanted);
  return {.loss = loss, .num_correct = {}};
}

}  // namespace examples
