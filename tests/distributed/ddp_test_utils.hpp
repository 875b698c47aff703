// SPDX-License-Identifier: Apache-2.0
// Models and data for the gradient tests. All values are small integers, so that every sum and
// every mean over 1, 2 or 4 ranks is exact and results can be compared with ==. The reference is
// always one plain module on the concatenation of all ranks' batches.
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

#include "ddp/reduce/distributed_data_parallel.hpp"
#include "support/catch.hpp"
#include "support/exact_model.hpp"
#include "support/multi_rank_main.hpp"

namespace ddp::test {

inline int world() {
  return context().world_size();
}
inline int rank() {
  return context().rank();
}
inline CommunicatorPtr group() {
  return context().communicator();
}
inline at::TensorOptions on_device() {
  return at::TensorOptions().device(context().device());
}

/// exact::integers() on this rank's device.
inline torch::Tensor integers(const std::vector<int64_t>& shape, int64_t seed) {
  return exact::integers(shape, seed).to(context().device());
}

/// The batch of rank `r` in step `step`.
inline torch::Tensor batch_of(int r, int64_t step, int64_t features, int64_t size = 3) {
  return integers({size, features}, 1000 * (step + 1) + r);
}

inline torch::Tensor concatenated(int64_t step, int64_t features, int64_t size = 3) {
  std::vector<torch::Tensor> parts;
  for (int r = 0; r < world(); ++r) {
    parts.push_back(batch_of(r, step, features, size));
  }
  return torch::cat(parts);
}

/// exact::Mlp on this rank's device.
struct MlpImpl : exact::MlpImpl {
  explicit MlpImpl(int64_t seed = 7, int64_t width = 5)
      : exact::MlpImpl(context().device(), seed, width) {}
};
TORCH_MODULE(Mlp);

inline torch::Tensor loss_of(Mlp& module, const torch::Tensor& x) {
  return module->forward(x).sum();
}

inline std::vector<torch::Tensor> grads_of(torch::nn::Module& module) {
  std::vector<torch::Tensor> grads;
  for (const auto& parameter : module.parameters()) {
    grads.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::Tensor());
  }
  return grads;
}

/// Gradients of `loss(module)` on a plain copy's parameters, divided by the world size.
template <typename Module, typename Loss>
std::vector<torch::Tensor> mean_reference(Module& module, const Loss& loss) {
  module->zero_grad();
  loss(module).backward();
  auto grads = grads_of(*module);
  for (auto& grad : grads) {
    if (grad.defined()) {
      grad.div_(world());
    }
  }
  return grads;
}

/// The synchronised backwards so far.
inline int64_t num_passes(DataParallelModel& model) {
  return model.logging_data().num_synchronised_backwards;
}

/// The loss of this rank's batch of `step`.
inline torch::Tensor loss_of(DistributedDataParallel<Mlp>& model, int64_t step) {
  return model.forward(batch_of(rank(), step, 4)).sum();
}

/// The mean over the ranks of the gradients that the batches of `steps` have in sum.
inline std::vector<torch::Tensor> mean_of_steps(Mlp& reference, std::vector<int64_t> steps) {
  return mean_reference(reference, [&](Mlp& plain) {
    torch::Tensor sum = torch::zeros({}, on_device());
    for (const auto step : steps) {
      sum = sum + plain->forward(concatenated(step, 4)).sum();
    }
    return sum;
  });
}

inline void require_equal(const std::vector<torch::Tensor>& actual,
                          const std::vector<torch::Tensor>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    INFO("parameter " << i);
    REQUIRE(actual[i].defined() == expected[i].defined());
    if (actual[i].defined()) {
      const bool are_equal = torch::equal(actual[i], expected[i]);
      // Millions of numbers take seconds to print.
      INFO((are_equal ? "" : concat("actual ", actual[i], "\nexpected ", expected[i])));
      REQUIRE(are_equal);
    }
  }
}

/// Bucket caps that cut the Mlp into one, three and six buckets.
inline std::vector<double> bucket_caps() {
  return {25, 100.0 / (1 << 20), 1.0 / (1 << 20)};
}

inline DdpOptions with_cap(NumberOrAuto bucket_cap_mb) {
  DdpOptions options;
  options.bucket_cap_mb = bucket_cap_mb;
  return options;
}

}  // namespace ddp::test
