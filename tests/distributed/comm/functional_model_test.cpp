// SPDX-License-Identifier: Apache-2.0
// Collectives with gradients in wrapped models, which average. The reference is one process. All
// numbers are exact.
#include "ddp/comm/functional.hpp"

#include <utility>

#include "distributed/comm/functional_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

// Each rank's own rows against the rows of all ranks.
Tensor contrast(const Tensor& own, const Tensor& all) {
  return own.mm(all.t()).sum() + own.mm(all.slice(0, 0, 1).t()).square().sum();
}

// float64, because the products exceed 2^24.
Mlp exact_mlp(int64_t seed = 7) {
  Mlp mlp(seed, 4);
  mlp->to(torch::kDouble);
  return mlp;
}
Tensor rows_of(int r, int64_t num_rows) {
  return batch_of(r, 0, 4, num_rows).to(torch::kDouble);
}

// The gradient of the sum of the ranks' losses, divided by `divisor`, by one process.
Tensors reference_gradients(const Sizes& sizes, double divisor) {
  auto plain = exact_mlp();
  Tensors outputs;
  for (int r = 0; r < world(); ++r) {
    outputs.push_back(plain->forward(rows_of(r, sizes[static_cast<size_t>(r)])));
  }
  auto total = torch::zeros({}, on_device().dtype(torch::kDouble));
  for (const auto& own : outputs) {
    total = total + contrast(own, torch::cat(outputs));
  }
  total.backward();
  auto grads = grads_of(*plain);
  for (auto& grad : grads) {
    grad.div_(divisor);
  }
  return grads;
}

// Collectives between two parts of a model. With `skips`, odd ranks leave the third part out.
struct PartsImpl : torch::nn::Module {
  explicit PartsImpl(CommunicatorPtr communicator_in, bool skips_in = false)
      : communicator(std::move(communicator_in)), skips(skips_in) {}
  Tensor after(const Tensor& hidden, int r) {
    const auto wide = torch::cat({hidden, torch::ones_like(hidden).slice(1, 0, 1)}, 1);
    const auto output = second->forward(wide);
    return skips && r % 2 == 1 ? output : output + third->forward(wide);
  }
  Tensor forward(const Tensor& x) {
    const auto hidden = all_to_all_with_grad(first->forward(x), communicator);
    return after(all_reduce_with_grad(hidden, communicator), rank());
  }
  const CommunicatorPtr communicator;
  const bool skips;
  Mlp first = register_module("first", exact_mlp(3));
  Mlp second = register_module("second", exact_mlp(5));
  Mlp third = register_module("third", exact_mlp(8));
};
TORCH_MODULE(Parts);

// The mean over the ranks of the losses `forward(rows_of(r, 4)).sum()`, by one process.
Tensors mean_of_parts(bool skips) {
  Parts plain(nullptr, skips);
  Tensors hidden;
  for (int r = 0; r < world(); ++r) {
    hidden.push_back(plain->first->forward(rows_of(r, 4)));
  }
  const auto per_rank = for_ranks([](int) { return 4 / world(); });
  const auto sum = sum_of(exchanged(hidden, [&](int) { return per_rank; }));
  auto total = torch::zeros({}, on_device().dtype(torch::kDouble));
  for (int r = 0; r < world(); ++r) {
    total = total + plain->after(sum, r).sum();
  }
  (total / world()).backward();
  return grads_of(*plain);
}

void require_mean_of_parts(const CommunicatorPtr& communicator, bool skips, double bucket_cap_mb) {
  auto options = with_cap(bucket_cap_mb);
  options.find_unused_parameters = skips;
  Parts module(communicator, skips);
  DistributedDataParallel<Parts> model(module, group(), options);
  const auto expected = mean_of_parts(skips);
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    model.forward(rows_of(rank(), 4)).sum().backward();
    require_equal(grads_of(*module), expected);
  }
}

}  // namespace

TEST_CASE("DDP averages: the gradient is that of the mean of the ranks' losses") {
  for (const double cap : bucket_caps()) {
    auto module = exact_mlp();
    DistributedDataParallel<Mlp> model(module, group(), with_cap(cap));
    const auto expected = reference_gradients(for_ranks([](int) { return 3; }), world());
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      const auto own = model.forward(rows_of(rank(), 3));
      contrast(own, all_gather_with_grad(own, group())).backward();
      require_equal(grads_of(*module), expected);
    }
  }
}

TEST_CASE("weighted_backward with unequal batches: the sum of the losses over the sum of counts") {
  const Sizes rows{1, 3, 0, 4};  // 1, 4 or 8 rows in all, so the division is exact
  const auto sizes = for_ranks([&](int r) { return rows[static_cast<size_t>(r)]; });
  const auto own_rows = sizes[static_cast<size_t>(rank())];
  auto module = exact_mlp();
  DistributedDataParallel<Mlp> model(module, group());
  const auto expected = reference_gradients(sizes, static_cast<double>(sum_of(sizes)));
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    const auto own = model.forward(rows_of(rank(), own_rows));
    model.weighted_backward(contrast(own, all_gather_with_grad(own, group(), sizes)),
                            static_cast<double>(own_rows));
    require_equal(grads_of(*module), expected);
  }
}

TEST_CASE("collectives in the middle of a wrapped model run between its buckets") {
  for (const double cap : bucket_caps()) {
    require_mean_of_parts(group(), /*skips=*/false, cap);
  }
}

TEST_CASE("a group of its own, where the ranks' graphs differ") {
  const auto own_group = group()->split(0, rank());
  for (const double cap : bucket_caps()) {
    require_mean_of_parts(own_group, /*skips=*/true, cap);
  }
}
