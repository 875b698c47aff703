// SPDX-License-Identifier: Apache-2.0
// Float32 masters on a GPU: their kernels round as they write the parameter, and a captured step
// follows what any kernel wrote into a parameter between two replays.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <torch/torch.h>

#include "support/catch.hpp"
#include "unit/optim/master_twins.hpp"

using namespace optim_test;
using ddp::OptimizerImplementation;
using ddp::OptimizerType;

namespace {

// The driver copies; LibTorch sees no write.
void write_by_driver(const at::Tensor& parameter, const at::Tensor& values) {
  C10_CUDA_CHECK(cudaMemcpyAsync(parameter.data_ptr(), values.data_ptr(),
                                 static_cast<size_t>(values.nbytes()), cudaMemcpyDeviceToDevice,
                                 c10::cuda::getCurrentCUDAStream().stream()));
}

}  // namespace

TEST_CASE("Masters that nobody writes keep their low bits on the GPU", "[gpu]") {
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  MasterTwins twins(at::kCUDA, dtype, twin_rule(OptimizerType::Sgd, implementation),
                    /*special=*/true);
  twins.run_alone();
}

TEST_CASE("A GPU update starts from what other code wrote into the parameter", "[gpu]") {
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  const auto type =
      GENERATE(OptimizerType::Sgd, OptimizerType::AdamW, OptimizerType::Lars, OptimizerType::Lamb);
  MasterTwins twins(at::kCUDA, dtype, twin_rule(type, implementation), type == OptimizerType::Sgd);
  CAPTURE(type);
  twins.run_with_writers();
}

TEST_CASE("A captured step starts from what a kernel wrote between two replays", "[gpu]") {
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  const auto type = GENERATE(OptimizerType::Sgd, OptimizerType::AdamW, OptimizerType::Lamb);
  CAPTURE(type);
  const c10::cuda::CUDAStreamGuard on_stream(c10::cuda::getStreamFromPool());
  // `captured.of_full` and `eager` are the eager twins.
  MasterTwins captured(at::kCUDA, at::kBFloat16, twin_rule(type, implementation));
  MasterTwins eager(at::kCUDA, at::kBFloat16, twin_rule(type, implementation));
  const at::Tensor lr =
      at::full({}, 0x1p-13, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA));
  captured.step(0, {.lr = lr});  // creates the state
  eager.step(0, {.lr = lr});
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  captured.of_half->step(ddp::StepScalars{.lr = lr});
  graph.capture_end();
  for (int64_t step = 1; step < 12; ++step) {
    captured.load_gradients(step);
    graph.replay();
    captured.of_full->step(ddp::StepScalars{.lr = lr});
    eager.step(step, {.lr = lr});
    captured.check();
    eager.check();
    for (size_t k = 0; k < eager.half.size(); ++k) {
      CHECK(same_bits(captured.half[k].tensor.detach(), eager.half[k].tensor.detach()));
    }
    if (step % 3 == 1) {  // a kernel on an alias
      captured.write_some(Writer::RawMemory);
      eager.write_some(Writer::RawMemory);
    } else if (step % 3 == 2) {
      for (MasterTwins* twins : {&captured, &eager}) {
        const at::Tensor given = twins->half[1].tensor.detach().neg();
        write_by_driver(twins->half[1].tensor, given);
        const at::Tensor twin = twins->full[1].tensor.detach();
        twin.copy_(at::where(given.eq(0), twin, given.to(at::kFloat)));  // -0 is 0
      }
    }
  }
}
