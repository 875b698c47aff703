// SPDX-License-Identifier: Apache-2.0
#include "train/graph/captured_step.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <iterator>
#include <utility>

#include "comm/cuda_check.hpp"
#include "core/fnv_hash.hpp"
#include "core/launch/place_in_loop.hpp"
#include "ddp/detail/check.hpp"
#include "train/graph/capture_failure.hpp"
#include "train/graph/step_publisher.hpp"

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
    // Errors are ignored, because the capture may have ended already or never begun.
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

// Returns the nodes of a query, which reports their number if it is called with null.
template <typename Query>
std::vector<cudaGraphNode_t> nodes_from(const Query& query) {
  size_t count = 0;
  check_cuda(query(nullptr, &count), "a query of a graph's nodes");
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) {
    check_cuda(query(nodes.data(), &count), "a query of a graph's nodes");
  }
  return nodes;
}

std::vector<cudaGraphNode_t> nodes_of(cudaGraph_t graph) {
  return nodes_from([graph](cudaGraphNode_t* nodes, size_t* count) {
    return cudaGraphGetNodes(graph, nodes, count);
  });
}

// CUDA 13's functions for edges have one more argument, the edges' data. These edges have none.
#if CUDART_VERSION >= 13000
#define DDP_NO_EDGE_DATA nullptr,
#else
#define DDP_NO_EDGE_DATA
#endif

bool has_type(cudaGraphNode_t node, cudaGraphNodeType type) {
  cudaGraphNodeType own{};
  check_cuda(cudaGraphNodeGetType(node, &own), "cudaGraphNodeGetType");
  return own == type;
}

bool is_small_memset(cudaGraphNode_t node, cudaMemsetParams& memset) {
  if (!has_type(node, cudaGraphNodeTypeMemset)) {
    return false;
  }
  check_cuda(cudaGraphMemsetNodeGetParams(node, &memset), "cudaGraphMemsetNodeGetParams");
  return memset.height <= 1 && memset.width > 0 && memset.width * memset.elementSize < 8192;
}

void replace(cudaGraph_t graph, cudaGraphNode_t node, const cudaMemsetParams& memset) {
  const auto before = nodes_from([node](cudaGraphNode_t* nodes, size_t* count) {
    return cudaGraphNodeGetDependencies(node, nodes, DDP_NO_EDGE_DATA count);
  });
  const auto behind = nodes_from([node](cudaGraphNode_t* nodes, size_t* count) {
    return cudaGraphNodeGetDependentNodes(node, nodes, DDP_NO_EDGE_DATA count);
  });
  cudaGraphNode_t kernel = nullptr;
  check_cuda(add_fill(graph, before.data(), before.size(), memset, &kernel),
             "cudaGraphAddKernelNode");
  if (!behind.empty()) {
    const std::vector<cudaGraphNode_t> from(behind.size(), kernel);
    check_cuda(
        cudaGraphAddDependencies(graph, from.data(), behind.data(), DDP_NO_EDGE_DATA behind.size()),
        "cudaGraphAddDependencies");
  }
  check_cuda(cudaGraphDestroyNode(node), "cudaGraphDestroyNode");
}

}  // namespace

uint64_t hash_gradients(const GraphedParts& parts) {
  FnvHash hash;
  for (auto* model : parts.models) {
    hash.add(model->reducer().hash_gradients());
  }
  return hash.value();
}

int64_t replace_small_memsets(cudaGraph_t graph) {
  int64_t replaced = 0;
  for (cudaGraphNode_t node : nodes_of(graph)) {
    cudaMemsetParams memset{};
    if (is_small_memset(node, memset)) {
      replace(graph, node, memset);
      ++replaced;
    }
  }
  return replaced;
}

void CapturedGraph::begin(at::cuda::MempoolId_t pool, const std::vector<at::Generator>& generators,
                          const FeedArguments& feed) {
  for (const auto& generator : generators) {
    register_generator(*this, generator);
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
        "a CUDA call that is not permitted during a capture ended the capture; run with "
        "train.cuda_graph=off and look for host waits or copies");
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
    try_call([&] { count_capture_end(capture_dev_); });
  }
  cudaGetLastError();  // clears the known error, which the next check must not report
  if (reset_frees_incomplete()) {
    try_call([&] { reset(); });
    return;
  }
  auto* host = at::getHostAllocator(at::kCUDA);
  try_call([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_); });
  try_call([&] { host->end_allocate_to_pool(mempool_id_); });
  if (!capture_ended_) {  // else reset() does it
    try_call([&] { c10::cuda::CUDACachingAllocator::releasePool(capture_dev_, mempool_id_); });
    try_call([&] { host->release_pool(mempool_id_); });
  }
  // Otherwise the next eager dropout would fail with "outside graph capture".
  for (auto& [state, increment] : captured_generator_states_) {
    stop_capturing(*state);
  }
}

std::string CapturedGraph::host_copies() const {
  for (cudaGraphNode_t node : nodes_of(graph_)) {
    if (!has_type(node, cudaGraphNodeTypeMemcpy)) {
      continue;
    }
    cudaMemcpy3DParms copy{};
    check_cuda(cudaGraphMemcpyNodeGetParams(node, &copy), "cudaGraphMemcpyNodeGetParams");
    const bool from = copy.srcPtr.ptr != nullptr && is_on_host(copy.srcPtr.ptr);
    const bool to = copy.dstPtr.ptr != nullptr && is_on_host(copy.dstPtr.ptr);
    if (from || to) {
      const auto bytes = copy.extent.width * copy.extent.height * copy.extent.depth;
      return concat("copies ", bytes, " bytes ", from ? "from" : "to",
                    " host memory (a CPU tensor inside the step), which a replay would ",
                    from ? "read" : "write", " after it may have been freed");
    }
  }
  return {};
}

int64_t CapturedGraph::num_nodes() const {
  return std::ssize(nodes_of(graph_));
}

void CapturedGraph::launch(const FeedArguments& feed) {
  check_cuda(set_feed(graph_exec_, feed_node_, feed), "cudaGraphExecKernelNodeSetParams");
  record_phase("replayed step");
  replay();
  record_phase("code after a replayed step");
}

CapturedStep::CapturedStep(const Request& request)
    : parts_(request.parts),
      ring_(request.ring),
      arguments_(request.feed.arguments()),
      pool_(request.pool.id()) {}

// Allocates the graph's own input tensors and replaces the call's inputs by them. The first replay
// copies the batch into them.
void CapturedStep::make_inputs(const Request& request) {
  int number = StepFeed::kFirstFree;
  for (const at::Tensor* input : request.call.inputs) {
    auto& own = inputs_.emplace_back();
    if (!input->defined()) {
      continue;
    }
    if (input->is_cpu()) {
      require_fed(*input, number);
      own = request.feed.numbers_like(*input, number);
      number += static_cast<int>(input->numel());
    } else {
      own = at::empty_strided(input->sizes(), input->strides(), input->options());
      own.set_requires_grad(input->requires_grad());
    }
  }
  set_arguments(request.call, request.sequence);
  for (size_t i = 0; i < inputs_.size(); ++i) {
    *request.call.inputs[i] = inputs_[i];
  }
}

void CapturedStep::set_arguments(const StepCall& call, uint64_t sequence) {
  set_step_numbers(call.numbers, sequence, arguments_);
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const at::Tensor& from = *call.inputs[i];
    if (!from.defined()) {
      continue;
    }
    if (from.is_cpu()) {
      append_numbers(from, arguments_);
    } else {
      append_copy(from, inputs_[i].mutable_data_ptr(), arguments_);
    }
  }
}

// The part of a capture that the graph records.
void CapturedStep::run(const Request& request) {
  StepOutput output;
  try {
    output = request.call.run(request.feed.scalars());
  } catch (const RehearsalEnd&) {
    is_rehearsal_ = true;
    return;
  }
  const auto logged = StepRing::scalars_of(output.tensors);
  publish(logged, request.feed, request.ring);
  num_scalars_ = static_cast<int>(logged.size());
  object_ = std::move(output.object);
}

std::unique_ptr<CapturedStep> CapturedStep::capture(const Request& request, std::string* failing) {
  std::unique_ptr<CapturedStep> step(new CapturedStep(request));
  step->make_inputs(request);
  const auto device = request.feed.device();
  const int64_t missing = missing_bytes(device, *step->pool_, request.step_bytes);
  // Clears autocast's cache. Otherwise the graph would always use weights that were cast before the
  // capture.
  at::autocast::clear_cache();
  const FailingOperation failing_operation;
  auto& graph = step->graph_;
  try {
    graph.begin(*step->pool_, request.parts.generators, step->arguments_);
    reserve_block(missing, device);
    step->run(request);
    at::autocast::clear_cache();
    request.at_end();
    graph.end();
    if (const auto copies = graph.host_copies(); !copies.empty()) {
      throw SettingsError("the step " + copies);
    }
  } catch (...) {
    *failing = failing_operation.names();
    at::autocast::clear_cache();
    graph.abandon();
    throw;
  }
  return step;
}

void CapturedStep::set_backward(uint64_t gradients, std::vector<Reducer::Local> left) {
  gradients_before_ = gradients;
  left_ = std::move(left);
}

bool CapturedStep::gradients_match() const {
  return !gradients_before_ || *gradients_before_ == hash_gradients(parts_);
}

StepDone CapturedStep::replay(StepCall& call, uint64_t sequence) {
  set_arguments(call, sequence);
  graph_.launch(arguments_);
  for (size_t i = 0; i < left_.size(); ++i) {
    parts_.models[i]->reducer().restore_local(left_[i]);
  }
  for (size_t i = 0; i < buffers_left_.size(); ++i) {
    if (buffers_left_[i]) {
      parts_.models[i]->reducer().buffers().set_state(*buffers_left_[i]);
    }
  }
  return {object_, ring_.log(sequence, num_scalars_)};
}

}  // namespace ddp::detail
