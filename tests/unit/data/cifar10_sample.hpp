// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace data_test {

/// The photographs of CIFAR-10 that the repository holds.
inline const std::string kSample = DDP_SOURCE_DIR "/data/cifar10-sample";

/// Where batches of it are made.
inline const at::Device kCpu(at::kCPU);

}  // namespace data_test
