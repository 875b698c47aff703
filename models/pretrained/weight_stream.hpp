// SPDX-License-Identifier: Apache-2.0
// Streams weights from files to the devices of a group at bus speed: each rank reads a part.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"

namespace models::detail {

/// One stored tensor and its target: a contiguous tensor with as many elements, cast if necessary.
struct WeightCopy {
  std::size_t file = 0;
  uint64_t offset = 0;
  uint64_t num_bytes = 0;
  at::ScalarType dtype = at::kFloat;
  at::Tensor target;
};

struct WeightStreamOptions {
  int num_threads = 4;
  uint64_t chunk_bytes = 256 << 20;
  uint64_t block_bytes = 4 << 20;  ///< size of one read and of one copy to the device
};

/// Collective if `communicator` is given. Every rank passes the same `copies`, in order of file and
/// offset, with targets on its communicator's device. Returns when all targets hold their data.
///
/// `agree` is called once before the first collective with this rank's error or nullptr; it throws
/// if any rank failed. Later reading errors are thrown on this rank alone. The other ranks then
/// have completed every collective but hold garbage, so the caller must agree on failure.
void stream_weights(const std::vector<std::string>& files, const std::vector<WeightCopy>& copies,
                    at::Device device, ddp::Communicator* communicator,
                    const WeightStreamOptions& options,
                    const std::function<void(std::exception_ptr)>& agree);

}  // namespace models::detail
