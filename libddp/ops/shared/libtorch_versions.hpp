// SPDX-License-Identifier: Apache-2.0
// What differs between the versions of LibTorch that libddp compiles with, all in this header. It
// asks for members, not for version numbers. docs/libtorch_versions.md lists what changed when.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#if DDP_HAS_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace ddp::detail {

/// Owns a node of autograd's graph: std::shared_ptr or c10::intrusive_ptr.
using NodePointer = decltype(torch::autograd::Edge::function);
using WeakNodePointer =
    std::conditional_t<std::is_same_v<NodePointer, std::shared_ptr<torch::autograd::Node>>,
                       std::weak_ptr<torch::autograd::Node>,
                       c10::weak_intrusive_ptr<torch::autograd::Node>>;

#if DDP_HAS_CUDA
/// Registers a generator for a capture. Newer generators register themselves when they draw.
template <typename Graph>
void register_generator(Graph& graph, const at::Generator& generator) {
  if constexpr (requires { graph.register_generator_state(generator); }) {
    graph.register_generator_state(generator);
  }
}

/// Ends a generator's capture that failed. Newer generators need no call, because a graph's
/// reset() removes their state.
template <typename State>
void stop_capturing(State& state) {
  if constexpr (requires { state.capturing_; }) {
    state.capturing_ = false;
  }
}

/// Newer allocators count the captures of a device. Call after ending a capture without
/// CUDAGraph::capture_end().
template <typename Allocator = c10::cuda::CUDACachingAllocator::CUDAAllocator>
void count_capture_end(c10::DeviceIndex device) {
  Allocator* allocator = c10::cuda::CUDACachingAllocator::get();
  if constexpr (requires { allocator->markCaptureEnd(device); }) {
    allocator->markCaptureEnd(device);
  }
}

/// Tells a derived class whether CUDAGraph::reset() also frees the memory of an incomplete capture.
class VersionedGraph : public at::cuda::CUDAGraph {
 protected:
  using CUDAGraph::CUDAGraph;

  template <typename Graph = VersionedGraph>
  static constexpr bool reset_frees_incomplete() {
    if constexpr (requires { Graph::allocated_pool_; }) {
      return true;
    }
    return false;
  }
};
#endif

}  // namespace ddp::detail
