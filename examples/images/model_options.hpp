// SPDX-License-Identifier: Apache-2.0
// Section `model` of resnet_ddp, and its models.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/fields.hpp"
#include "ddp/data/dataset.hpp"
#include "models/resnet.hpp"
#include "models/simple_cnn.hpp"

namespace examples {

/// The value of model.name for a models::SimpleCnn.
inline constexpr const char* kSimpleCnn = "simple_cnn";

struct ModelOptions {
  std::string name = "resnet18";
  std::string stem = "imagenet";
  bool zero_init_residual = false;
  bool sync_batch_norm = false;
  bool channels_last = false;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::string ops = "fused";
  std::string weights = "";
  double ema_decay = 0.0;
};
void describe_fields(ModelOptions& options, ddp::FieldVisitor& visitor);

/// The sections that resnet_ddp adds.
std::vector<ddp::Section> resnet_sections();

/// Creates the model for the data set's channels and classes, on the communicator's device, ready
/// to be wrapped. The memory format is set. Rank 0 loads the weights; wrapping broadcasts them.
/// Weights are rounded to model.dtype, except those of normalisation.
models::ResNet make_model(const ModelOptions& options, const ddp::Dataset& data,
                          const ddp::CommunicatorPtr& communicator);
/// The same for model.name=simple_cnn. Throws SettingsError for options that only a ResNet has.
models::SimpleCnn make_simple_cnn(const ModelOptions& options, const ddp::Dataset& data,
                                  const ddp::CommunicatorPtr& communicator);

}  // namespace examples
