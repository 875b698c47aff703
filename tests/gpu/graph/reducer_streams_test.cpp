// SPDX-License-Identifier: Apache-2.0
// Gradients that an op writes on another stream during the backward: their reduction waits for
// them, the backward does not.
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "ddp/core/error.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "gpu/capture.hpp"
#include "ops/shared/grad_slot.hpp"
#include "ops/shared/timing_event.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

c10::cuda::CUDAStream side_stream() {
  static const auto stream = c10::cuda::getStreamFromPool();
  return stream;
}

// x w; the side stream writes the gradient of w after a delay. Its inputs are kept until the next
// backward.
class LateProduct : public torch::autograd::Function<LateProduct> {
 public:
  static inline double delay_ms = 0;
  static inline std::vector<torch::Tensor> kept;

  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& x,
                               const torch::Tensor& w) {
    ctx->save_for_backward({x, w});
    return x.matmul(w);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto& x = saved[0];
    const auto& w = saved[1];
    auto* slot = ops::find_grad_slot(w);
    REQUIRE(slot != nullptr);
    const auto side = side_stream();
    ddp::ops::detail::wait_for(c10::cuda::getCurrentCUDAStream(), side);
    {
      const c10::cuda::CUDAStreamGuard guard(side);
      ddp::ops::detail::delay_device(context().device(), delay_ms);
      const auto product = x.t().matmul(grads[0]);
      if (ops::begin_grad_write(w, *slot) == 0) {
        slot->memory.copy_(product);
      } else {
        slot->memory.add_(product);
      }
      kept.push_back(product);
    }
    kept.insert(kept.end(), {x, grads[0]});
    return {grads[0].matmul(w.t()), torch::Tensor()};
  }
};

struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    for (int layer = 0; layer < 3; ++layer) {
      weights.push_back(register_parameter(ddp::concat("w", layer), integers({4, 4}, layer)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& weight : weights) {
      x = late ? LateProduct::apply(x, weight) : x.matmul(weight);
    }
    return x;
  }
  bool late = true;
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Chain);

// A large weight that an op with a gradient on another stream uses, and a plain op.
struct TiedImpl : torch::nn::Module {
  TiedImpl() { weight = register_parameter("weight", integers({4096, 4096}, 3)); }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = late ? LateProduct::apply(x, weight) : x.matmul(weight);
    return y.sum() + weight.square().sum();
  }
  bool late = true;
  torch::Tensor weight;
};
TORCH_MODULE(Tied);

std::vector<torch::Tensor> reference_of(int64_t step) {
  Chain reference;
  reference->late = false;
  return mean_reference(reference,
                        [&](Chain& plain) { return plain->forward(concatenated(step, 4)).sum(); });
}

}  // namespace

TEST_CASE("a reduction waits for gradients written beside backward, and backward does not") {
  const double cap = GENERATE(25.0, 1.0 / (1 << 20));  // one bucket, or one per weight
  CAPTURE(cap);
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  Chain module;
  DistributedDataParallel model(module, group(), with_cap(cap));
  constexpr double kDelayMs = 10;
  LateProduct::delay_ms = kDelayMs;
  ddp::ops::detail::TimingEvent begin;
  ddp::ops::detail::TimingEvent chain_end;
  ddp::ops::detail::TimingEvent end;
  for (int step = 0; step < 4; ++step) {
    LateProduct::kept.clear();
    auto input = batch_of(rank(), step, 4).requires_grad_();
    input.register_hook(
        [&](const torch::Tensor& /*grad*/) { chain_end.record(context().device()); });
    model.zero_grad();
    const auto loss = model.forward(input).sum();
    group()->barrier();
    begin.record(context().device());
    loss.backward();
    end.record(context().device());
    require_equal(grads_of(*module), reference_of(step));
    if (step > 0) {  // connected, and buckets are rebuilt
      CHECK(ddp::ops::detail::TimingEvent::milliseconds(begin, chain_end) < 0.8 * kDelayMs);
      CHECK(ddp::ops::detail::TimingEvent::milliseconds(begin, end) > 2 * kDelayMs);
    }
  }
}

TEST_CASE("a plain op adds to a slot after the op that adds to it on another stream") {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  Tied module, reference;
  reference->late = false;
  DistributedDataParallel model(module, group());
  LateProduct::delay_ms = 0;
  for (int step = 0; step < 10; ++step) {
    model.zero_grad();
    {
      const auto local = model.no_sync();
      model.forward(batch_of(rank(), step, 4096)).backward();
    }
    model.forward(batch_of(rank(), step + 50, 4096)).backward();  // .grad lies in the slot
    reference->zero_grad();
    for (int r = 0; r < world(); ++r) {
      (reference->forward(batch_of(r, step, 4096)) / world()).backward();
      (reference->forward(batch_of(r, step + 50, 4096)) / world()).backward();
    }
    require_equal(grads_of(*module), grads_of(*reference));
    LateProduct::kept.clear();
  }
}

TEST_CASE("gradients written beside a captured backward are reduced by its replays") {
  const double cap = GENERATE(25.0, 1.0 / (1 << 20));
  CAPTURE(cap);
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  Chain module;
  DistributedDataParallel model(module, group(), with_cap(cap));
  LateProduct::delay_ms = 1;
  auto input = torch::zeros({3, 4}, on_device());
  const auto step = [&] {
    LateProduct::kept.clear();
    model.zero_grad();
    model.forward(input).sum().backward();
  };
  at::cuda::CUDAGraph graph;
  warm_up_and_capture(graph, step);
  for (int replay = 0; replay < 5; ++replay) {
    input.copy_(batch_of(rank(), replay, 4));
    graph.replay();
    require_equal(grads_of(*module), reference_of(replay));
  }
  LateProduct::kept.clear();
}
