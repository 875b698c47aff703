// SPDX-License-Identifier: Apache-2.0
#include "images/model_options.hpp"

#include <torch/torch.h>

#include "common/sample_trainer.hpp"
#include "ddp/reduce/sync_batch_norm.hpp"
#include "ddp/train/config.hpp"
#include "ddp/train/weights.hpp"
#include "images/image_program.hpp"
#include "models/memory_format.hpp"
#include "models/precision.hpp"

namespace examples {

void describe_fields(ModelOptions& o, ddp::FieldVisitor& v) {
  v.field({.name = "name",
           .doc = "Architecture. simple_cnn: three stages of a 3x3 convolution, 94 thousand "
                  "parameters; stem, zero_init_residual, ops and weights are ResNet's alone.",
           .choices = {"resnet18", "resnet34", "resnet50", "resnet101", "resnet152", kSimpleCnn},
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
  describe_ema_decay(o.ema_decay, v);
}

std::vector<ddp::Section> resnet_sections() {
  return image_sections(ddp::declare_section<ModelOptions>(
      "model", "The network: architecture, dtype, first weights."));
}

namespace {

/// Empty: BatchNorm2d.
models::NormFactory make_norm(const ModelOptions& options,
                              const ddp::CommunicatorPtr& communicator) {
  if (!options.sync_batch_norm) {
    return {};
  }
  return [communicator](int64_t channels) {
    return torch::nn::AnyModule(ddp::SyncBatchNorm(channels, communicator));
  };
}

/// To the device, the dtype and the memory format.
void place(torch::nn::Module& module, const ModelOptions& options, at::Device device) {
  module.to(device);
  if (options.dtype != torch::kFloat32) {
    models::to_half_but_norms(module, options.dtype);
  }
  if (options.channels_last) {
    models::to_channels_last(module);
  }
}

}  // namespace

models::ResNet make_model(const ModelOptions& options, const ddp::Dataset& data,
                          const ddp::CommunicatorPtr& communicator) {
  models::ResNetOptions resnet{.num_classes = data.num_classes(),
                               .in_channels = data.layout().value().shape.at(0)};
  resnet.stem = options.stem == "cifar" ? models::Stem::Cifar : models::Stem::Imagenet;
  resnet.zero_init_residual = options.zero_init_residual;
  resnet.fused_ops = options.ops == "fused";
  resnet.side_streams = resnet.fused_ops;
  resnet.norm = make_norm(options, communicator);
  auto module = models::make_resnet(options.name, resnet);
  if (!options.weights.empty() && communicator->rank() == 0) {
    ddp::load_weights(*module, options.weights);
  }
  place(*module, options, communicator->device());
  return module;
}

models::SimpleCnn make_simple_cnn(const ModelOptions& options, const ddp::Dataset& data,
                                  const ddp::CommunicatorPtr& communicator) {
  const ModelOptions usual;
  for (const auto& [key, is_set] : {std::pair{"stem", options.stem != usual.stem},
                                    {"zero_init_residual", options.zero_init_residual},
                                    {"ops", options.ops != usual.ops},
                                    {"weights", !options.weights.empty()}}) {
    if (is_set) {
      throw ddp::SettingsError(ddp::concat("model.", key, " is set, but model.name=", kSimpleCnn,
                                           " has no such option; fix: leave it out, or set "
                                           "model.name=resnet18"));
    }
  }
  models::SimpleCnn module(
      models::SimpleCnnOptions{.in_channels = data.layout().value().shape.at(0),
                               .num_classes = data.num_classes(),
                               .norm = make_norm(options, communicator)});
  place(*module, options, communicator->device());
  return module;
}

}  // namespace examples
