// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace data_test {

/// The CIFAR-10 photographs in the repository.
inline const std::string kSample = DDP_SOURCE_DIR "/data/cifar10-sample";

/// Device of the sample's batches.
inline const at::Device kCpu(at::kCPU);

}  // namespace data_test
