// SPDX-License-Identifier: Apache-2.0
// convert_sync_batchnorm: which norms it replaces, and what the model keeps.
#include "ddp/ops/vision.hpp"
#include "ddp/reduce/sync_batch_norm.hpp"
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

TEST_CASE("convert_sync_batchnorm replaces norms in a Sequential and names the ones it cannot") {
  torch::nn::Sequential net(torch::nn::Conv2d(3, 6, 1), torch::nn::BatchNorm2d(6),
                            torch::nn::ReLU());
  net->to(context().device());
  const auto weight = net->named_parameters()["1.weight"];
  convert_sync_batchnorm(*net, group());
  REQUIRE(std::dynamic_pointer_cast<SyncBatchNormImpl>(net->ptr(1)) != nullptr);
  REQUIRE(net->named_parameters().contains("1.weight"));
  REQUIRE(net->named_parameters()["1.weight"].data_ptr() == weight.data_ptr());
  REQUIRE(net->named_buffers().contains("1.running_mean"));
  auto y = net->forward(torch::randn({2, 3, 4, 4}, on_device()));
  y.sum().backward();

  struct TypedImpl : torch::nn::Module {
    TypedImpl() { norm = register_module("norm", torch::nn::BatchNorm2d(6)); }
    torch::nn::BatchNorm2d norm{nullptr};
  };
  auto typed = std::make_shared<TypedImpl>();
  REQUIRE_THROWS_WITH(convert_sync_batchnorm(*typed, group()), Catch::Contains("norm"));
}

TEST_CASE("convert_sync_batchnorm keeps parameters and buffers the same objects") {
  struct SharedImpl : torch::nn::Cloneable<SharedImpl> {
    SharedImpl() { SharedImpl::reset(); }
    void reset() override {
      norm = torch::nn::BatchNorm2d(6);
      first = register_module("first", torch::nn::Sequential(torch::nn::Conv2d(6, 6, 1), norm,
                                                             torch::nn::ReLU(), norm));
      second = register_module(
          "second", torch::nn::Sequential(
                        torch::nn::Conv2d(6, 6, 1), norm,
                        torch::nn::BatchNorm2d(torch::nn::BatchNormOptions(6).affine(false))));
    }
    torch::Tensor forward(const torch::Tensor& x) { return second->forward(first->forward(x)); }
    torch::nn::BatchNorm2d norm{nullptr};
    torch::nn::Sequential first{nullptr}, second{nullptr};
  };
  const auto net = std::make_shared<SharedImpl>();
  auto twice = net->norm;
  {
    const torch::NoGradGuard no_grad;  // the ranks' generators differ
    for (auto& parameter : net->parameters()) {
      parameter.copy_(torch::randn(parameter.sizes(), at::detail::createCPUGenerator(7)));
    }
  }
  twice->bias.set_requires_grad(false);
  net->to(context().device());
  const auto plain = std::dynamic_pointer_cast<SharedImpl>(net->clone());
  const auto before_parameters = net->parameters();
  const auto before_buffers = net->buffers();
  torch::optim::SGD optimizer(net->parameters(), 1.0);
  convert_sync_batchnorm(*net, group());

  const auto are_same = [](const auto& a, const auto& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const auto& x, const auto& y) { return x.is_same(y); });
  };
  REQUIRE(are_same(net->parameters(), before_parameters));
  REQUIRE(are_same(net->buffers(), before_buffers));
  const auto* sync = net->first->ptr(1)->as<SyncBatchNormImpl>();
  REQUIRE(sync != nullptr);
  REQUIRE(net->first->ptr(3).get() == sync);
  REQUIRE(net->second->ptr(1).get() == sync);
  REQUIRE_FALSE(twice->bias.requires_grad());

  // Equal inputs on all ranks have the statistics of one rank's input.
  const auto x = torch::randn({4, 6, 3, 3}, at::detail::createCPUGenerator(5)).to(on_device());
  for (int step = 0; step < 2; ++step) {
    const auto y = net->forward(x);
    CHECK((step > 0 || torch::allclose(y, plain->forward(x), 1e-4, 1e-4)));
    const auto weight = twice->weight.detach().clone();
    optimizer.zero_grad();
    (y * torch::arange(y.numel(), on_device()).to(torch::kFloat).cos().view_as(y)).sum().backward();
    optimizer.step();
    CHECK_FALSE(torch::equal(twice->weight, weight));
    CHECK(sync->weight.is_same(twice->weight));
  }
  CHECK(twice->num_batches_tracked.item<int64_t>() == 6);
}

TEST_CASE("convert_sync_batchnorm refuses a BatchNorm itself, which it cannot replace") {
  torch::nn::BatchNorm1d norm(6);
  REQUIRE_THROWS_WITH(
      convert_sync_batchnorm(*norm, group()),
      Catch::Contains("is a BatchNorm itself") && Catch::Contains("fix: make a SyncBatchNorm"));
}

TEST_CASE("convert_sync_batchnorm reaches a named Sequential and the norms of a NormOwner") {
  struct OwnerImpl : torch::nn::Module, ops::NormOwner {
    OwnerImpl() {
      const torch::nn::BatchNorm2d made(6);
      norm_ = torch::nn::AnyModule(made);
      register_module("norm", made);
    }
    std::vector<std::string> norm_names() const override { return {"norm"}; }
    std::shared_ptr<torch::nn::Module> norm(const std::string& /*name*/) const override {
      return norm_.ptr();
    }
    void replace_norm(const std::string& name, torch::nn::AnyModule replacement) override {
      replace_module(name, replacement.ptr());
      norm_ = std::move(replacement);
    }
    torch::Tensor forward(const torch::Tensor& x) { return norm_.forward(x); }
    torch::nn::AnyModule norm_;
  };
  torch::nn::Sequential net({{"conv", torch::nn::AnyModule(torch::nn::Conv2d(3, 6, 1))},
                             {"bn", torch::nn::AnyModule(torch::nn::BatchNorm2d(6))}});
  net->push_back("owner", OwnerImpl());
  net->to(context().device());
  convert_sync_batchnorm(*net, group());
  REQUIRE(net->named_children()["bn"]->as<SyncBatchNormImpl>() != nullptr);
  REQUIRE(net[2]->as<OwnerImpl>()->norm("norm")->as<SyncBatchNormImpl>() != nullptr);
  // Checks the output, because the layer in use may differ from the registered one; the ranks hold
  // unequal shares of one batch.
  net->train();
  const auto x = torch::full({rank() + 1, 3, 2, 2}, static_cast<double>(rank()), on_device());
  const auto y = net->forward(x);
  auto sum = y.detach().sum(torch::IntArrayRef{0, 2, 3}).contiguous();
  group()->all_reduce(sum)->wait();
  REQUIRE(torch::allclose(sum, torch::zeros_like(sum), 0, 1e-4));
}
