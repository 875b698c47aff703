// SPDX-License-Identifier: Apache-2.0
#include "images/vit_settings.hpp"

#include <torch/torch.h>

#include "common/sample_trainer.hpp"
#include "ddp/core/error.hpp"
#include "ddp/train/config.hpp"
#include "ddp/train/weights.hpp"
#include "images/image_program.hpp"

namespace examples {

void describe_fields(VitSettings& s, ddp::FieldVisitor& v) {
  v.field({.name = "name",
           .doc = "Size: hidden 192, 384, 768 or 1024; 12 layers, vit_l 24; patches of 16 pixels.",
           .choices = {"vit_ti_16", "vit_s_16", "vit_b_16", "vit_l_16"},
           .common = true},
          s.name);
  v.field({.name = "patch_size",
           .doc = "Side of a patch in pixels, a divisor of the image size. 0: that of the name.",
           .min = 0},
          s.patch_size);
  v.field({.name = "dropout",
           .doc = "Of embeddings, of residual branches and inside the MLP.",
           .min = 0,
           .max = 0.999999},
          s.dropout);
  v.field({.name = "stochastic_depth",
           .doc = "Probability that a sample skips a branch of the last layer. It grows linearly "
                  "over the layers from 0.",
           .min = 0,
           .max = 0.999999},
          s.stochastic_depth);
  v.field({.name = "dtype",
           .doc = "Dtype of the parameters. For bf16 parameters the optimizer keeps float32 copies "
                  "(masters), and forward does not cast them."},
          s.dtype, {{"fp32", torch::kFloat32}, {"bf16", torch::kBFloat16}});
  v.field({.name = "weights",
           .doc = "Initial weights: a safetensors file with torchvision's names. Empty: random."},
          s.weights);
  describe_ema_decay(s.ema_decay, v);
}

std::vector<ddp::Section> vit_sections() {
  return image_sections(ddp::declare_section<VitSettings>(
      "model", "The Vision Transformer: size, dropout, first weights."));
}

models::Vit make_vit(const VitSettings& settings, const ddp::Dataset& data,
                     const ddp::CommunicatorPtr& communicator) {
  auto options = models::vit_options(settings.name);
  const auto shape = data.layout().value().shape;
  if (shape.at(0) != 3) {
    throw ddp::SettingsError(ddp::concat("the Vision Transformer needs images of 3 channels, not ",
                                         shape.at(0), "; fix: set data.channels=3"));
  }
  options.image_size = shape.at(1);
  options.num_classes = data.num_classes();
  options.dropout = settings.dropout;
  options.stochastic_depth = settings.stochastic_depth;
  if (settings.patch_size > 0) {
    options.patch_size = settings.patch_size;
  }
  if (options.image_size % options.patch_size != 0) {
    throw ddp::SettingsError(ddp::concat(
        "patches of ", options.patch_size, " pixels do not divide images of ", options.image_size,
        "; fix: set model.patch_size to a divisor of ", options.image_size,
        ", or data.image_size to a multiple of ", options.patch_size));
  }
  models::Vit module(options);
  if (!settings.weights.empty() && communicator->rank() == 0) {
    ddp::load_weights(*module, settings.weights);
  }
  module->to(communicator->device(), settings.dtype);
  return module;
}

}  // namespace examples
