// SPDX-License-Identifier: Apache-2.0
// The settings of a training recipe that belong to the examples: sections `model` and `recipe`.
#pragma once

#include <cstdint>
#include <string>

#include "ddp/core/fields.hpp"

namespace examples {

struct ModelOptions {
  std::string name = "resnet18";
  std::string stem = "imagenet";
  bool zero_init_residual = false;
  bool sync_batch_norm = false;
  bool channels_last = true;
  std::string weights = "";
};
void describe_fields(ModelOptions& options, ddp::FieldVisitor& visitor);

struct RecipeOptions {
  int64_t epochs = 1;
  int64_t grad_accum_steps = 1;
  double label_smoothing = 0.0;
  double mixup_alpha = 0.0;
  double ema_decay = 0.0;
  int64_t eval_every_epochs = 1;
  int64_t eval_batch_size = 0;
  bool cudnn_benchmark = true;
};
void describe_fields(RecipeOptions& options, ddp::FieldVisitor& visitor);

}  // namespace examples
