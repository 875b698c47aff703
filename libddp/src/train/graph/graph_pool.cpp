// SPDX-License-Identifier: Apache-2.0
#include "train/graph/graph_pool.hpp"

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "comm/cuda_check.hpp"

namespace ddp {

std::shared_ptr<const GraphPool::Id> GraphPool::id() {
  auto id = id_.lock();
  if (id == nullptr) {
    id = std::make_shared<const Id>(at::cuda::graph_pool_handle());
    id_ = id;
  }
  return id;
}

namespace detail {
namespace {

int64_t allocated_bytes(at::Device device, bool peak) {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  return peak ? stats.allocated_bytes[kAll].peak : stats.allocated_bytes[kAll].current;
}

}  // namespace

PeakBytes::PeakBytes(at::Device device)
    : device_(device), before_(allocated_bytes(device, /*peak=*/false)) {
  c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
}

int64_t PeakBytes::bytes() const {
  const int64_t stays = std::max(before_, allocated_bytes(device_, /*peak=*/false));
  return allocated_bytes(device_, /*peak=*/true) - stays;
}

int64_t missing_bytes(at::Device device, GraphPool::Id pool, int64_t bytes) {
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  for (const auto& segment :
       c10::cuda::CUDACachingAllocator::snapshot(pool, /*include_traces=*/false).segments) {
    const bool counts = segment.device == device.index() && segment.owner_private_pool_id == pool &&
                        segment.stream == stream;
    bytes -= counts ? static_cast<int64_t>(segment.total_size - segment.allocated_size) : 0;
  }
  size_t free = 0;
  size_t total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return bytes > 0 && static_cast<size_t>(bytes) < free ? bytes : 0;
}

void reserve_block(int64_t bytes, at::Device device) {
  if (bytes > 0) {
    try {
      at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    } catch (const c10::OutOfMemoryError&) {
      return;  // another program or an allocator limit took the memory; smaller pieces may fit
    }
  }
}

}  // namespace detail
}  // namespace ddp
