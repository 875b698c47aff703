// SPDX-License-Identifier: Apache-2.0
// The sections of cnn_ddp, and the network for its data.
#pragma once

#include <cstdint>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/fields.hpp"
#include "ddp/train/config.hpp"
#include "models/simple_cnn.hpp"
#include "tensors/tensor_files.hpp"

namespace examples {

/// Section model.
struct CnnSettings {
  std::vector<int64_t> channels = {16, 32, 64};
  int64_t kernel_size = 5;
  double dropout = 0;
  LossKind loss = LossKind::CrossEntropy;
  bool sync_batch_norm = false;
  double ema_decay = 0;
};
void describe_fields(CnnSettings& settings, ddp::FieldVisitor& visitor);

/// Section tensors: the embedded waveforms by default.
struct CnnFiles : TensorFiles {
  CnnFiles();
};

/// The sections that cnn_ddp adds.
std::vector<ddp::Section> cnn_sections();

/// Creates the network for the data's dimensions, channels and targets on the communicator's
/// device, ready to be wrapped. Throws DataError if the data is not one input [rows, channels,
/// length], [rows, channels, height, width] or [rows, channels, depth, height, width] and one
/// target [rows] or, without classes, [rows, values].
models::SimpleCnn make_cnn(const CnnSettings& settings, const TensorData& data,
                           const ddp::CommunicatorPtr& communicator);

}  // namespace examples
