// SPDX-License-Identifier: Apache-2.0
#include "tensors/cnn_settings.hpp"

#include <torch/torch.h>

#include <algorithm>

#include "common/sample_trainer.hpp"
#include "ddp/core/error.hpp"
#include "ddp/reduce/sync_batch_norm.hpp"

namespace examples {

using ddp::concat;

void describe_fields(CnnSettings& s, ddp::FieldVisitor& v) {
  v.field({.name = "channels",
           .doc = "Channels of each stage. All stages but the last halve the input's extents.",
           .min = 1,
           .common = true},
          s.channels);
  v.field({.name = "kernel_size",
           .doc = "Size of the convolutions in each dimension, odd.",
           .min = 1,
           .common = true},
          s.kernel_size);
  v.field({.name = "dropout", .doc = "Dropout before the last layer.", .min = 0, .max = 0.999999},
          s.dropout);
  auto losses = loss_names();
  std::erase_if(losses, [](const auto& entry) { return entry.second == LossKind::InGraph; });
  v.field({.name = "loss",
           .doc = "Of the output and the target. cross_entropy: the target is the class. bce: "
                  "binary cross entropy with logits.",
           .common = true},
          s.loss, losses);
  v.field({.name = "sync_batch_norm", .doc = "Compute batch statistics over all ranks."},
          s.sync_batch_norm);
  describe_ema_decay(s.ema_decay, v);
}

CnnFiles::CnnFiles() {
  path = "data/waveform-sample/waveforms.safetensors";
  eval_rows = 160;
}

std::vector<ddp::Section> cnn_sections() {
  return {ddp::declare_section<CnnSettings>("model", "The network and its loss."),
          ddp::declare_section<CnnFiles>("tensors", "Files with one input and the target."),
          {"data", [](ddp::FieldVisitor&) {}},  // for images
          ddp::uses({"train.grad_accum_steps", "train.max_grad_norm", "train.non_finite",
                     "train.label_smoothing", "train.eval_every", "train.eval_every_steps",
                     "train.eval_first", "train.eval_batch_size", "train.cuda_graph",
                     "train.replay_check_every"})};
}

models::SimpleCnn make_cnn(const CnnSettings& settings, const TensorData& data,
                           const ddp::CommunicatorPtr& communicator) {
  if (settings.channels.empty() || settings.kernel_size % 2 == 0) {
    throw ddp::SettingsError(concat("model.channels has ", settings.channels.size(),
                                    " stages and model.kernel_size is ", settings.kernel_size,
                                    "; fix: give at least one stage and an odd size"));
  }
  const auto row = data.train->get(0).tensors;
  const auto input = row.front().sizes(), target = row.back().sizes();
  if (data.names.size() != 2 || input.size() < 3 || input.size() > 5) {
    throw ddp::DataError(
        concat("tensors.path has ", data.names.size() - 1, " input(s) besides the target, and a ",
               "sample of ", data.names.front(), " has the shape ", input.slice(1),
               ", but the network takes one input, of shape [channels, length], [channels, height, "
               "width] or [channels, depth, height, width]; fix: save one, with a dimension of 1 "
               "for a single channel"));
  }
  const bool has_classes = settings.loss == LossKind::CrossEntropy;
  if (target.size() > (has_classes ? 1 : 2)) {
    throw ddp::DataError(concat("the target of a sample has the shape ", target.slice(1),
                                "; fix: save a target [rows]",
                                has_classes ? "" : " or [rows, values]"));
  }
  const auto halvings = settings.channels.size() - 1;
  const auto smallest = *std::min_element(input.begin() + 2, input.end());
  if (halvings >= 63 || smallest >> halvings == 0) {
    throw ddp::SettingsError(concat("the ", settings.channels.size(), " stages of model.channels ",
                                    "halve a sample of shape ", input.slice(1), ' ', halvings,
                                    " times; fix: give fewer channels"));
  }
  models::SimpleCnn module(models::SimpleCnnOptions{
      .in_channels = input[1],
      .channels = settings.channels,
      .num_classes = has_classes ? data.facts.num_classes : row.back().numel(),
      .dropout = settings.dropout,
      .num_dims = static_cast<int64_t>(input.size()) - 2,
      .kernel_size = settings.kernel_size});
  if (settings.sync_batch_norm) {
    ddp::convert_sync_batchnorm(*module, communicator);
  }
  module->to(communicator->device());
  return module;
}

}  // namespace examples
