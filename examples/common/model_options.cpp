// SPDX-License-Identifier: Apache-2.0
#include "common/model_options.hpp"

#include <torch/torch.h>

#include "ddp/reduce/sync_batch_norm.hpp"
#include "ddp/train/config.hpp"
#include "ddp/train/weights.hpp"
#include "models/memory_format.hpp"
#include "models/precision.hpp"

namespace examples {

void describe_fields(ModelOptions& o, ddp::FieldVisitor& v) {
  v.field({.name = "name",
           .doc = "Architecture.",
           .choices = {"resnet18", "resnet34", "resnet50", "resnet101", "resnet152"},
           .common = true},
          o.name);
  v.field({.name = "stem",
           .doc = "First layers. imagenet: 7x7 convolution and max pool. cifar: 3x3 convolution.",
           .choices = {"imagenet", "cifar"}},
          o.stem);
  v.field({.name = "zero_init_residual", .doc = "Start each residual block as the identity."},
          o.zero_init_residual);
  v.field({.name = "sync_batch_norm", .doc = "Compute batch statistics over all ranks."},
          o.sync_batch_norm);
  v.field({.name = "channels_last", .doc = "Use NHWC strides for weights and images."},
          o.channels_last);
  v.field({.name = "dtype",
           .doc = "Dtype of the parameters, except those of normalisation. For bf16 "
                  "parameters the optimizer keeps float32 copies (masters), and forward "
                  "does not cast them."},
          o.dtype, {{"fp32", torch::kFloat32}, {"bf16", torch::kBFloat16}});
  v.field(
      {.name = "ops",
       .doc = "fused: libddp's own ops where they exist. plain: LibTorch's ops, for comparison.",
       .choices = {"fused", "plain"}},
      o.ops);
  v.field({.name = "weights",
           .doc = "Initial weights: a safetensors file with torchvision's names. Empty: random."},
          o.weights);
  v.field({.name = "ema_decay",
           .doc = "Decay of an exponential moving average of weights and buffers. Evaluation "
                  "uses the average. 0: off.",
           .min = 0,
           .max = 0.999999},
          o.ema_decay);
}

std::vector<ddp::Section> resnet_sections() {
  return {ddp::declare_section<ModelOptions>("model",
                                             "The ResNet: architecture, dtype, first weights."),
          ddp::uses({"train"})};
}

models::ResNet make_model(const ModelOptions& options, const ddp::Dataset& data,
                          const ddp::CommunicatorPtr& communicator) {
  models::ResNetOptions resnet{.num_classes = data.num_classes(),
                               .in_channels = data.layout().value().shape.at(0)};
  resnet.stem = options.stem == "cifar" ? models::Stem::Cifar : models::Stem::Imagenet;
  resnet.zero_init_residual = options.zero_init_residual;
  resnet.fused_ops = options.ops == "fused";
  resnet.side_streams = resnet.fused_ops;
  if (options.sync_batch_norm) {
    resnet.norm = [communicator](int64_t channels) {
      return torch::nn::AnyModule(ddp::SyncBatchNorm(channels, communicator));
    };
  }
  auto module = models::make_resnet(options.name, resnet);
  if (!options.weights.empty() && communicator->rank() == 0) {
    ddp::load_weights(*module, options.weights);
  }
  module->to(communicator->device());
  if (options.dtype != torch::kFloat32) {
    models::to_half_but_norms(*module, options.dtype);
  }
  if (options.channels_last) {
    models::to_channels_last(*module);
  }
  return module;
}

}  // namespace examples
