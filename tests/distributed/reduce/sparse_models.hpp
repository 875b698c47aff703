// SPDX-License-Identifier: Apache-2.0
// Embeddings with sparse gradients, and the reference: one process with dense gradients on the ids
// of all ranks.
#pragma once

#include "ddp/optim/sparse.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "support/fuse.hpp"

namespace ddp::test {

inline constexpr int64_t kRows = 11;

inline DdpOptions gather(double cap = 25) {
  auto options = with_cap(cap);
  options.sparse = SparseGradients::Gather;
  return options;
}

// Ids with repetitions. Ranks have different numbers of them, and rank 1 has none in odd steps.
inline torch::Tensor ids_of(int r, int64_t step) {
  const int64_t count = r == 1 && step % 2 == 1 ? 0 : 3 + 2 * r;
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + r));
  return torch::randint(0, kRows, {count}, generator, torch::kLong).to(context().device());
}

inline torch::Tensor all_ids(int64_t step) {
  std::vector<torch::Tensor> parts;
  for (int r = 0; r < world(); ++r) {
    parts.push_back(ids_of(r, step));
  }
  return torch::cat(parts);
}

/// Two tables of rows, and a dense layer that may be left out.
struct TablesImpl : torch::nn::Module {
  explicit TablesImpl(bool sparse, bool has_dense = true, at::ScalarType dtype = at::kFloat) {
    users = register_module(
        "users", torch::nn::Embedding(torch::nn::EmbeddingOptions(kRows, 4).sparse(sparse)));
    items = register_module(
        "items", torch::nn::EmbeddingBag(
                     torch::nn::EmbeddingBagOptions(kRows, 4).sparse(sparse).mode(torch::kSum)));
    if (has_dense) {
      head = register_module("head", torch::nn::Linear(4, 3));
    }
    const torch::NoGradGuard no_grad;
    int64_t index = 0;
    for (auto& parameter : parameters()) {
      parameter.copy_(integers(parameter.sizes().vec(), 50 + index++).cpu());
    }
    to(context().device(), dtype);
  }
  torch::Tensor forward(const torch::Tensor& ids) {
    auto x = users(ids) * 2 + items(ids.unsqueeze(1));
    return head ? head(fuses ? Fuse::apply(x) : x) : x;
  }
  bool fuses = false;  // the backward may throw between the head and the tables
  torch::nn::Embedding users{nullptr};
  torch::nn::EmbeddingBag items{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Tables);

/// The wrapped model with sparse gradients, and the reference without.
struct Sides {
  explicit Sides(const DdpOptions& options = gather(), bool has_dense = true)
      : module(true, has_dense), reference(false, has_dense), model(module, group(), options) {}

  torch::Tensor loss(int64_t step) { return model.forward(ids_of(rank(), step)).sum(); }
  /// The mean over the ranks of the sum of the steps' gradients.
  void require_mean(const std::vector<int64_t>& steps) {
    const auto expected = mean_reference(reference, [&](Tables& plain) {
      torch::Tensor sum = torch::zeros({}, on_device());
      for (const auto step : steps) {
        sum = sum + plain->forward(all_ids(step)).sum();
      }
      return sum;
    });
    require_equal(dense_grads(), expected);
    require_same_on_all_ranks();
  }
  std::vector<torch::Tensor> dense_grads() {
    std::vector<torch::Tensor> grads;
    for (const auto& parameter : module->parameters()) {
      const auto& grad = parameter.grad();
      grads.push_back(!grad.defined() ? grad : grad.is_sparse() ? grad.to_dense() : grad.clone());
    }
    return grads;
  }
  /// The rows are coalesced tensors with the same bits.
  void require_same_on_all_ranks() {
    for (const auto& [name, tensor] : sparse_parameters(model)) {
      INFO(name);
      const auto& grad = tensor.grad();
      REQUIRE(grad.layout() == torch::kSparse);
      REQUIRE(grad.is_coalesced());
      const auto mine = fingerprint_of({{"indices", grad.indices()}, {"values", grad.values()}});
      for (const auto& other : context().control_plane().all_gather(mine)) {
        REQUIRE(other == mine);
      }
    }
  }

  Tables module;
  Tables reference;
  DistributedDataParallel<Tables> model;
};

}  // namespace ddp::test
