// SPDX-License-Identifier: Apache-2.0
// Trains on files of tensors.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "common/sample_trainer.hpp"
#include "tensors/tensor_files.hpp"

namespace examples {

/// Forwards with arguments by name.
struct TensorForwards {
  using Forward = std::function<c10::IValue(const std::map<std::string, c10::IValue>&)>;
  Forward wrapper;
  Forward module;  ///< without the wrapper, which may communicate
  /// ExportedModule::check_call of the module. Empty: the module takes batches of all sizes.
  std::function<void(const std::map<std::string, c10::IValue>&)> check = {};
  std::string output = "";  ///< the one that the loss uses: select_output()
};

/// Trains as the settings say, with evaluations and checkpoints. Floating-point arguments get the
/// dtype of the parameters. Collective.
SampleRun train_tensors(ddp::Context& ctx, ddp::Config cfg, const TensorData& data,
                        const SampleModel& wrapped, const TensorForwards& forwards);

}  // namespace examples
