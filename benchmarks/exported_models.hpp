// SPDX-License-Identifier: Apache-2.0
// Models of torch.export in place of the library's own: setting `archive`, with `fuse`.
#pragma once

#include <torch/torch.h>

#include <limits>
#include <memory>
#include <string>

#include "bench_common.hpp"
#include "ddp/export/exported_module.hpp"
#include "ddp/ops/vision.hpp"
#include "models/language_model.hpp"

namespace bench {

inline ddp::ExportedModule exported_module(const Settings& settings, at::Device device) {
  ddp::ExportedModule module(settings.text("archive"),
                             ddp::ExportedModuleOptions{.fuse = settings.flag("fuse")});
  module->to(device);
  module->train();
  return module;
}

/// The output, or the entry `logits` of a dict.
inline at::Tensor logits_of(const c10::IValue& output) {
  return output.isGenericDict() ? output.toGenericDict().at("logits").toTensor()
                                : output.toTensor();
}

/// A program that takes ids [batch, length] and returns logits [batch, length, vocabulary], or with
/// `in_graph` takes the labels too and returns their mean loss.
class ExportedLanguageModel : public models::LanguageModel {
 public:
  ExportedLanguageModel(const Settings& settings, at::Device device)
      : module_(register_module("module", exported_module(settings, device))),
        in_graph_(settings.flag("in_graph")) {
    const auto rows = settings.number("vocab_size");
    for (const auto& parameter : module_->parameters()) {
      if (parameter.dim() == 2 && parameter.size(0) == rows) {
        head_ = parameter;
      }
    }
    if (!head_.defined()) {
      throw ddp::SettingsError(ddp::concat("bench_lm: the archive has no matrix of vocab_size = ",
                                           rows, " rows; fix: the vocabulary of its model"));
    }
  }

  void arrange_weights() override {}
  const torch::Tensor& head_weight() const override { return head_; }
  int64_t num_layers() const override { return 0; }
  int64_t max_positions() const override { return std::numeric_limits<int64_t>::max(); }
  double flops_per_token(int64_t /*seq_len*/) const override { return matrix_flops_per_token(); }

  models::LmOutput forward(const models::TokenInput& input, const torch::Tensor& labels) override {
    const auto flat = labels.reshape(-1);
    if (in_graph_) {
      const auto loss =
          module_->forward(std::vector<c10::IValue>{input.input_ids, labels}).toTensor();
      return {loss * flat.ne(ddp::ops::kIgnoreIndex).sum(), at::zeros_like(loss, at::kLong)};
    }
    const auto logits = logits_of(module_->forward({input.input_ids}));
    const auto loss = ddp::ops::cross_entropy(logits.reshape({flat.size(0), -1}), flat,
                                              {.ignore_index = ddp::ops::kIgnoreIndex});
    return {loss.loss * flat.ne(ddp::ops::kIgnoreIndex).sum(), loss.num_correct};
  }

 protected:
  bool is_matrix_product(const std::string& name) const override {
    return name.find("wpe") == std::string::npos && name.find("position") == std::string::npos;
  }

 private:
  ddp::ExportedModule module_;
  bool in_graph_;
  torch::Tensor head_;
};

}  // namespace bench
