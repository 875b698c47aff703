// SPDX-License-Identifier: Apache-2.0
#include "ops/vision/cudnn_convolution.hpp"

#ifdef DDP_HAS_CUDNN

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ddp/detail/text_stream.hpp"
#include "ops/shared/choice_book.hpp"
#include "ops/shared/private_stream.hpp"
#include "ops/vision/cudnn_descriptor.hpp"

namespace ddp::ops::detail {
namespace {

constexpr int64_t kMaxEngineWorkspaceBytes = int64_t{256} << 20;
constexpr int64_t kMaxEngines = 12;  // per heuristic
constexpr int64_t kAlignment = 16;
// Among engines within this factor of the fastest, cuDNN's order decides. With concurrent kernels,
// an engine that fills the GPU with many partial sums slows the other kernels more than it gains.
constexpr float kSameAlone = 1.02F, kSameConcurrent = 1.25F;
constexpr int64_t kX = 'x', kW = 'w', kY = 'y';

/// [n, c, h, w], stored as [n, h, w, c].
CudnnDescriptor describe(const at::Tensor& tensor, int64_t id) {
  const auto sizes = tensor.sizes();
  const int64_t c = sizes[1], h = sizes[2], w = sizes[3];
  CudnnDescriptor made(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  made.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id)
      .set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE,
           tensor.scalar_type() == at::kHalf ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16)
      .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, sizes.vec())
      .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64,
           std::vector<int64_t>{h * w * c, 1, w * c, c})
      .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, kAlignment)
      .finalize();
  return made;
}

CudnnDescriptor describe_geometry(const Convolution& call) {
  const auto both = [](int64_t value) { return std::vector<int64_t>{value, value}; };
  CudnnDescriptor made(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  made.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, int64_t{2})
      .set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT)
      .set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, CUDNN_CROSS_CORRELATION)
      .set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, both(call.padding))
      .set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, both(call.padding))
      .set(CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, both(1))
      .set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, both(call.stride))
      .finalize();
  return made;
}

/// cuDNN's names for a pass and its tensors.
struct PassNames {
  cudnnBackendDescriptorType_t operation;
  cudnnBackendAttributeName_t geometry, x, w, y, alpha, beta;
};

const PassNames& names_of(ConvolutionPass pass) {
  static constexpr PassNames kForward = {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                                         CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                                         CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                                         CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                                         CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                                         CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                                         CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA};
  static constexpr PassNames kInput = {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                                       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                                       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                                       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                                       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                                       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                                       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA};
  static constexpr PassNames kWeight = {
      CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};
  return pass == ConvolutionPass::Forward         ? kForward
         : pass == ConvolutionPass::InputGradient ? kInput
                                                  : kWeight;
}

/// An engine with settings, ready to run.
struct Engine {
  CudnnDescriptor config, plan;
  int64_t workspace_bytes;
};

CudnnDescriptor operation_graph(cudnnHandle_t handle, ConvolutionPass pass,
                                const Convolution& call) {
  const auto geometry = describe_geometry(call);
  const auto x = describe(call.x, kX), w = describe(call.w, kW), y = describe(call.y, kY);
  const auto& names = names_of(pass);
  CudnnDescriptor operation(names.operation);
  operation.set(names.geometry, geometry)
      .set(names.x, x)
      .set(names.w, w)
      .set(names.y, y)
      .set(names.alpha, CUDNN_TYPE_FLOAT, 1.0F)
      .set(names.beta, CUDNN_TYPE_FLOAT, 0.0F)
      .finalize();
  CudnnDescriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operation)
      .set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle)
      .finalize();
  return graph;
}

/// Appends the engines that one heuristic proposes and cuDNN can build.
void append_engines(cudnnHandle_t handle, const CudnnDescriptor& graph, cudnnBackendHeurMode_t mode,
                    std::vector<Engine>& engines) {
  CudnnDescriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)
      .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
  if (!heuristic.try_finalize()) {
    return;
  }
  std::vector<CudnnDescriptor> configs;
  std::vector<cudnnBackendDescriptor_t> handles;
  for (int64_t i = 0; i < kMaxEngines; ++i) {
    handles.push_back(configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).get());
  }
  int64_t found = 0;
  check_cudnn(
      cudnnBackendGetAttribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                               CUDNN_TYPE_BACKEND_DESCRIPTOR, kMaxEngines, &found, handles.data()),
      "cudnnBackendGetAttribute");
  for (int64_t i = 0; i < std::min(found, kMaxEngines); ++i) {
    CudnnDescriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    auto& config = configs[static_cast<size_t>(i)];
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle)
        .set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    if (!plan.try_finalize()) {
      continue;  // proposed, but unsupported on this GPU or for this shape
    }
    const int64_t bytes = plan.number(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
    if (bytes <= kMaxEngineWorkspaceBytes) {
      engines.push_back({std::move(config), std::move(plan), bytes});
    }
  }
}

at::Tensor workspace_of(int64_t bytes, const at::Tensor& like) {
  return at::empty({bytes}, like.options().dtype(at::kByte), at::nullopt);
}

void run(cudnnHandle_t handle, const Engine& engine, const Convolution& call, void* workspace) {
  check_cudnn(cudnnSetStream(handle, c10::cuda::getCurrentCUDAStream()), "cudnnSetStream");
  const auto pointer = [](const at::Tensor& tensor) {
    return const_cast<void*>(tensor.const_data_ptr());
  };
  CudnnDescriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, std::vector<int64_t>{kX, kW, kY})
      .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR,
           std::vector<void*>{pointer(call.x), pointer(call.w), pointer(call.y)})
      .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace)
      .finalize();
  check_cudnn(cudnnBackendExecute(handle, engine.plan.get(), pack.get()), "cudnnBackendExecute");
}

using Key = std::array<int64_t, 14>;

Key key_of(ConvolutionPass pass, const Convolution& call) {
  const auto x = call.x.sizes(), w = call.w.sizes();
  return {static_cast<int64_t>(pass),
          static_cast<int64_t>(call.x.scalar_type()),
          call.x.device().index(),
          call.stride,
          call.padding,
          call.concurrent,
          x[0],
          x[1],
          x[2],
          x[3],
          w[0],
          w[1],
          w[2],
          w[3]};
}

/// The name of a choice, valid for any device. Plans of earlier runs hold these names.
std::string name_of(ConvolutionPass pass, const Convolution& call) {
  const char* name = pass == ConvolutionPass::Forward         ? "forward"
                     : pass == ConvolutionPass::InputGradient ? "input gradient"
                                                              : "weight gradient";
  ddp::detail::TextStream text;
  text << "cudnn " << name << ' ' << call.x.scalar_type() << " x " << call.x.sizes() << " w "
       << call.w.sizes() << " stride " << call.stride << " padding " << call.padding
       << (call.concurrent ? " beside" : "");
  return text.str();
}

/// The process's choices, never destroyed: the order of cuDNN's teardown is unknown.
struct Choices {
  std::mutex mutex;
  std::map<int, cudnnHandle_t> handles;
  std::map<Key, std::unique_ptr<Engine>> engines;  // nullptr: LibTorch's choice

  static Choices& instance() {
    static auto* choices = new Choices;
    return *choices;
  }

  cudnnHandle_t handle(int device) {
    auto& handle = handles[device];
    if (handle == nullptr) {
      check_cudnn(cudnnCreate(&handle), "cudnnCreate");
    }
    return handle;
  }
};

/// A workspace of `bytes`, or an empty one without memory: some engines need none.
at::Tensor workspace_if_any(int64_t bytes, const at::Tensor& like) {
  try {
    return workspace_of(bytes, like);
  } catch (const c10::OutOfMemoryError&) {
    return workspace_of(0, like);
  }
}

std::unique_ptr<Engine> measure(cudnnHandle_t handle, ConvolutionPass pass,
                                const Convolution& call) {
  std::vector<Engine> engines;
  const auto graph = operation_graph(handle, pass, call);
  for (const auto mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_B}) {
    append_engines(handle, graph, mode, engines);
  }
  int64_t bytes = 0;
  for (const auto& engine : engines) {
    bytes = std::max(bytes, engine.workspace_bytes);
  }
  const auto workspace = workspace_if_any(bytes, call.x);  // before anything is captured
  const auto call_of = [&](size_t i) {
    TORCH_CHECK(engines[i].workspace_bytes <= workspace.numel(),
                "no memory for this engine's workspace");
    run(handle, engines[i], call, workspace.data_ptr());
  };
  // A choice made without the full workspace is not kept for the next run.
  const auto name = workspace.numel() < bytes ? std::string() : name_of(pass, call);
  const size_t fastest = choose_fastest(name, call.x.device(), engines.size(), call_of,
                                        call.concurrent ? kSameConcurrent : kSameAlone);
  return fastest < engines.size() ? std::make_unique<Engine>(std::move(engines[fastest])) : nullptr;
}

/// nullptr if no engine can be measured; LibTorch may still have one that runs.
std::unique_ptr<Engine> choose(Choices& choices, ConvolutionPass pass, const Convolution& call) {
  try {
    return measure(choices.handle(call.x.device().index()), pass, call);
  } catch (const c10::Error& error) {
    cudaGetLastError();  // clears the handled error
    TORCH_WARN_ONCE("conv2d: cuDNN's engines cannot be measured for x ", call.x.sizes(),
                    " and weight ", call.w.sizes(), " (", error.what_without_backtrace(),
                    "); LibTorch chooses the engine. Further such shapes are not logged");
    return nullptr;
  }
}

/// Whether this process's cuDNN is the compiled version, which LibTorch also uses.
bool is_cudnn_of_libtorch() {
  static const bool same = [] {
    const auto& hooks = at::detail::getCUDAHooks();
    const auto major = [](auto version) { return static_cast<int64_t>(version) / 10000; };
    return hooks.hasCuDNN() && major(cudnnGetVersion()) == major(CUDNN_VERSION) &&
           major(hooks.versionRuntimeCuDNN()) == major(CUDNN_VERSION);
  }();
  return same;
}

bool fits(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.is_cuda() && tensor.device() == like.device() &&
         tensor.scalar_type() == like.scalar_type() && tensor.dim() == 4 && tensor.numel() > 0 &&
         tensor.is_contiguous(at::MemoryFormat::ChannelsLast) &&
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment == 0;
}

}  // namespace

bool convolve_by_cudnn(ConvolutionPass pass, const Convolution& call) {
  auto& context = at::globalContext();
  const bool half = call.x.scalar_type() == at::kBFloat16 || call.x.scalar_type() == at::kHalf;
  if (!half || !context.userEnabledCuDNN() || !context.benchmarkCuDNN() ||
      context.deterministicCuDNN() || context.deterministicAlgorithms() || !fits(call.x, call.x) ||
      !fits(call.w, call.x) || !fits(call.y, call.x) || !is_cudnn_of_libtorch()) {
    return false;
  }
  const c10::cuda::CUDAGuard device(call.x.device());
  auto& choices = Choices::instance();
  const std::lock_guard lock(choices.mutex);
  const auto key = key_of(pass, call);
  auto known = choices.engines.find(key);
  if (known == choices.engines.end()) {
    // A shape first met in a capture stays with LibTorch: a later eager call must give the replay's
    // bits.
    known = choices.engines
                .emplace(key, is_captured(c10::cuda::getCurrentCUDAStream())
                                  ? nullptr
                                  : choose(choices, pass, call))
                .first;
  }
  if (known->second == nullptr) {
    return false;
  }
  at::Tensor workspace;
  try {
    workspace = workspace_of(known->second->workspace_bytes, call.x);
  } catch (const c10::OutOfMemoryError&) {
    return false;  // LibTorch tries engines that need less memory
  }
  run(choices.handle(call.x.device().index()), *known->second, call, workspace.data_ptr());
  return true;
}

}  // namespace ddp::ops::detail

#else

namespace ddp::ops::detail {

bool convolve_by_cudnn(ConvolutionPass, const Convolution&) {
  return false;
}

}  // namespace ddp::ops::detail

#endif
