// SPDX-License-Identifier: Apache-2.0
// Section `model` of vit_ddp.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/fields.hpp"
#include "ddp/data/dataset.hpp"
#include "models/vit.hpp"

namespace examples {

struct VitSettings {
  std::string name = "vit_s_16";
  int64_t patch_size = 0;
  double dropout = 0;
  double stochastic_depth = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::string weights = "";
  double ema_decay = 0;
};
void describe_fields(VitSettings& settings, ddp::FieldVisitor& visitor);

/// The sections that vit_ddp adds.
std::vector<ddp::Section> vit_sections();

/// Creates the model for the data's images and classes on the communicator's device, ready to be
/// wrapped. Rank 0 loads the weights; wrapping broadcasts them. Throws SettingsError if the patch
/// size does not divide the image size.
models::Vit make_vit(const VitSettings& settings, const ddp::Dataset& data,
                     const ddp::CommunicatorPtr& communicator);

}  // namespace examples
