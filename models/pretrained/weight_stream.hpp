// SPDX-License-Identifier: Apache-2.0
// Weights from files to the devices of a group at the speed of its buses: each rank reads a part.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"

namespace models::detail {

/// One tensor: where it lies, and a contiguous tensor of as many elements that receives it, cast.
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
  uint64_t block_bytes = 4 << 20;  ///< of one read and one copy to the device
};

/// Collective where `communicator` is given: every rank the same `copies`, in order of file and
/// offset, its targets on its communicator's device. Returns when all targets hold their data.
/// `agree` is called once before the first collective, with what went wrong on this rank or with
/// nullptr, and throws where anything went wrong on any. Throws what reading threw on this rank;
/// then the other ranks have taken part in every collective, and hold garbage: the caller agrees on
/// failure.
void stream_weights(const std::vector<std::string>& files, const std::vector<WeightCopy>& copies,
                    at::Device device, ddp::Communicator* communicator,
                    const WeightStreamOptions& options,
                    const std::function<void(std::exception_ptr)>& agree);

}  // namespace models::detail
