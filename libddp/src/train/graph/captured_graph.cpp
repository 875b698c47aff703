// SPDX-License-Identifier: Apache-2.0
#include "train/graph/captured_graph.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "comm/cuda_check.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/check.hpp"
#include "train/graph/graph_fills.hpp"

namespace ddp::detail {
namespace {

// The node before the stream's next node.
cudaGraphNode_t last_node(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* nodes = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  const auto code =
      cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, &nodes, nullptr, &count);
#else
  const auto code = cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, &nodes, &count);
#endif
  check_cuda(code, "cudaStreamGetCaptureInfo");
  DDP_CHECK(status == cudaStreamCaptureStatusActive && count == 1);
  return nodes[0];
}

template <typename Call>
void try_call(const Call& call) noexcept {
  try {
    call();
  } catch (const std::exception&) {
    // Already done, or never begun: the state of an abandoned capture is unknown.
  }
}

bool is_on_host(const void* pointer) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
    cudaGetLastError();
    return true;
  }
  return attributes.type == cudaMemoryTypeHost || attributes.type == cudaMemoryTypeUnregistered;
}

}  // namespace

void CapturedGraph::begin(at::cuda::MempoolId_t pool, const std::vector<at::Generator>& generators,
                          const FeedArguments& feed) {
  for (const auto& generator : generators) {
    register_generator_state(generator);
  }
  begun_ = true;
  // Other threads of this process (loader, watchdog, checkpoint writer) may call CUDA meanwhile.
  capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  check_cuda(launch_feed(feed, capture_stream_.stream()), "the kernel that feeds a step");
  feed_node_ = last_node(capture_stream_.stream());
}

void CapturedGraph::end() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(capture_stream_.stream(), &status), "cudaStreamIsCapturing");
  if (status != cudaStreamCaptureStatusActive) {
    throw SettingsError(
        "an operation that is not permitted while a step is captured ended the capture, and its "
        "error was not passed on");
  }
  capture_end();
  begun_ = false;
  replace_small_memsets(graph_);
}

void CapturedGraph::abandon() noexcept {
  if (!begun_) {
    return;
  }
  begun_ = false;
  const auto stream = capture_stream_.stream();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
      status != cudaStreamCaptureStatusNone) {
    cudaGraph_t partial = nullptr;
    cudaStreamEndCapture(stream, &partial);
    if (partial != nullptr) {
      cudaGraphDestroy(partial);
    }
  }
  cudaGetLastError();  // clears the known error, which the next check must not report
  auto* host = at::getHostAllocator(at::kCUDA);
  try_call([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_); });
  try_call([&] { host->end_allocate_to_pool(mempool_id_); });
  if (!capture_ended_) {  // else reset() does it
    try_call([&] { c10::cuda::CUDACachingAllocator::releasePool(capture_dev_, mempool_id_); });
    try_call([&] { host->release_pool(mempool_id_); });
  }
  // Otherwise the next eager dropout would fail with "outside graph capture".
  for (auto& [state, increment] : captured_generator_states_) {
    state->capturing_ = false;
  }
}

std::string CapturedGraph::host_copies() const {
  size_t count = 0;
  check_cuda(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  check_cuda(cudaGraphGetNodes(graph_, nodes.data(), &count), "cudaGraphGetNodes");
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    check_cuda(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
    if (type != cudaGraphNodeTypeMemcpy) {
      continue;
    }
    cudaMemcpy3DParms copy{};
    check_cuda(cudaGraphMemcpyNodeGetParams(node, &copy), "cudaGraphMemcpyNodeGetParams");
    const bool from = copy.srcPtr.ptr != nullptr && is_on_host(copy.srcPtr.ptr);
    const bool to = copy.dstPtr.ptr != nullptr && is_on_host(copy.dstPtr.ptr);
    if (from || to) {
      const auto bytes = copy.extent.width * copy.extent.height * copy.extent.depth;
      return concat("copies ", bytes, " bytes ", from ? "from" : "to",
                    " host memory (a tensor of the CPU inside the step), which each replay would ",
                    from ? "read" : "write", " again when it may be gone");
    }
  }
  return {};
}

int64_t CapturedGraph::num_nodes() const {
  size_t count = 0;
  check_cuda(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
  return static_cast<int64_t>(count);
}

void CapturedGraph::launch(const FeedArguments& feed) {
  check_cuda(set_feed(graph_exec_, feed_node_, feed), "cudaGraphExecKernelNodeSetParams");
  replay();
}

}  // namespace ddp::detail
