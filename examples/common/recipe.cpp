// SPDX-License-Identifier: Apache-2.0
#include "common/recipe.hpp"

namespace examples {

void describe_fields(ModelOptions& o, ddp::FieldVisitor& v) {
  v.field({.name = "name",
           .doc = "architecture",
           .choices = {"resnet18", "resnet34", "resnet50", "resnet101", "resnet152"}},
          o.name);
  v.field({.name = "stem",
           .doc = "imagenet: 7x7 convolution and max pool; cifar: 3x3 convolution",
           .choices = {"imagenet", "cifar"}},
          o.stem);
  v.field({.name = "zero_init_residual", .doc = "start each residual block as the identity"},
          o.zero_init_residual);
  v.field({.name = "sync_batch_norm", .doc = "batch statistics over all ranks"}, o.sync_batch_norm);
  v.field({.name = "channels_last", .doc = "NHWC weights and images"}, o.channels_last);
  v.field(
      {.name = "weights",
       .doc = "safetensors file with weights to start from, by torchvision's names; empty: none"},
      o.weights);
}

void describe_fields(RecipeOptions& o, ddp::FieldVisitor& v) {
  v.field(
      {.name = "epochs", .doc = "passes over the data; train.max_steps may end earlier", .min = 1},
      o.epochs);
  v.field({.name = "grad_accum_steps",
           .doc = "batches whose gradients are added up before an optimizer step",
           .min = 1},
          o.grad_accum_steps);
  v.field({.name = "label_smoothing",
           .doc = "share of the target spread over all classes",
           .min = 0,
           .max = 1},
          o.label_smoothing);
  v.field({.name = "mixup_alpha",
           .doc = "mixup with weights from Beta(alpha, alpha) (arXiv:1710.09412); 0: off",
           .min = 0,
           .max = 4},
          o.mixup_alpha);
  v.field({.name = "ema_decay",
           .doc = "evaluate and save an exponential moving average of the weights; 0: off",
           .min = 0,
           .max = 0.999999},
          o.ema_decay);
  v.field({.name = "eval_every_epochs",
           .doc = "epochs between evaluations; the last epoch is always evaluated; 0: only that",
           .min = 0},
          o.eval_every_epochs);
  v.field({.name = "eval_batch_size",
           .doc = "samples a rank in evaluation; 0: as in training",
           .min = 0},
          o.eval_batch_size);
  v.field({.name = "cudnn_benchmark", .doc = "let cuDNN measure its algorithms"},
          o.cudnn_benchmark);
}

}  // namespace examples
