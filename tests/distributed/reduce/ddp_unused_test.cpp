// SPDX-License-Identifier: Apache-2.0
// Parameters without a gradient in some steps, and outputs of every kind.
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

// Branch "always" always runs, "some" on request, "never" never.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    always = register_module("always", torch::nn::Linear(4, 3));
    some = register_module("some", torch::nn::Linear(4, 3));
    never = register_module("never", torch::nn::Linear(4, 3));
    const torch::NoGradGuard no_grad;
    int64_t seed = 40;
    for (auto& parameter : parameters()) {
      parameter.copy_(integers(parameter.sizes().vec(), seed++).cpu());
    }
    to(context().device());
  }
  torch::Tensor forward(const torch::Tensor& x, bool with_some) {
    auto y = always(x);
    return with_some ? y + some(x) : y;
  }
  torch::nn::Linear always{nullptr}, some{nullptr}, never{nullptr};
};
TORCH_MODULE(Branches);

// Returns one of its parameters together with its output, like CLIP's logit scale.
struct ScaledImpl : torch::nn::Module {
  ScaledImpl() {
    layer = register_module("layer", torch::nn::Linear(4, 3));
    scale = register_parameter("scale", torch::full({1}, 2.0));
    const torch::NoGradGuard no_grad;
    layer->weight.copy_(integers({3, 4}, 7).cpu());
    layer->bias.copy_(integers({3}, 8).cpu());
    to(context().device());
  }
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
    return {layer(x), scale};
  }
  torch::nn::Linear layer{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(Scaled);

torch::Tensor loss_of_scaled(const std::tuple<torch::Tensor, torch::Tensor>& outputs) {
  return (std::get<0>(outputs).sum() * std::get<1>(outputs)).sum();
}

DdpOptions find_unused(double cap) {
  auto options = with_cap(cap);
  options.find_unused_parameters = true;
  return options;
}

}  // namespace

TEST_CASE(
    "unused here but used elsewhere gets the reduced value; unused everywhere stays undefined") {
  for (const double cap : bucket_caps()) {
    CAPTURE(cap);
    Branches module;
    Branches reference;
    DistributedDataParallel model(module, group(), find_unused(cap));
    for (int step = 0; step < 4; ++step) {
      const int user = step % world();  // only this rank uses the branch
      model.zero_grad();
      model.forward(batch_of(rank(), step, 4), rank() == user).sum().backward();
      const auto expected = mean_reference(reference, [&](Branches& plain) {
        torch::Tensor sum = torch::zeros({}, on_device());
        for (int r = 0; r < world(); ++r) {
          sum = sum + plain->forward(batch_of(r, step, 4), r == user).sum();
        }
        return sum;
      });
      REQUIRE_FALSE(module->never->weight.grad().defined());
      require_equal(grads_of(*module), expected);
    }
  }
}

TEST_CASE("static_graph: a forward may return a parameter, and its graph may outlive the wrapper") {
  Scaled module;
  Scaled reference;
  for (int wrapped = 0; wrapped < 2; ++wrapped) {
    DdpOptions options;
    options.static_graph = true;
    DistributedDataParallel model(module, group(), options);
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      loss_of_scaled(model.forward(batch_of(rank(), step, 4))).backward();
      const auto expected = mean_reference(reference, [&](Scaled& plain) {
        torch::Tensor sum = torch::zeros({}, on_device());
        for (int r = 0; r < world(); ++r) {
          sum = sum + loss_of_scaled(plain->forward(batch_of(r, step, 4)));
        }
        return sum;
      });
      require_equal(grads_of(*module), expected);
    }
  }
}

TEST_CASE("nobody uses a branch in one step after all used it: its gradient stays undefined") {
  Branches module;
  DistributedDataParallel model(module, group(), find_unused(25));
  model.zero_grad();
  model.forward(batch_of(rank(), 0, 4), true).sum().backward();
  REQUIRE(module->some->weight.grad().defined());
  model.zero_grad();
  model.forward(batch_of(rank(), 1, 4), false).sum().backward();
  REQUIRE_FALSE(module->some->weight.grad().defined());
  REQUIRE(model.logging_data().unused_parameter_size == 4);
  REQUIRE_FALSE(model.logging_data().can_set_static_graph);
}

TEST_CASE("a parameter used under no_sync counts as used in the synchronised step") {
  for (const double cap : bucket_caps()) {
    Branches module;
    Branches reference;
    DistributedDataParallel model(module, group(), find_unused(cap));
    for (int round = 0; round < 3; ++round) {
      model.zero_grad();
      {
        auto guard = model.no_sync();
        model.forward(batch_of(rank(), 2 * round, 4), rank() == 0).sum().backward();
      }
      model.forward(batch_of(rank(), 2 * round + 1, 4), false).sum().backward();
      const auto expected = mean_reference(reference, [&](Branches& plain) {
        torch::Tensor sum = torch::zeros({}, on_device());
        for (int r = 0; r < world(); ++r) {
          sum = sum + plain->forward(batch_of(r, 2 * round, 4), r == 0).sum() +
                plain->forward(batch_of(r, 2 * round + 1, 4), false).sum();
        }
        return sum;
      });
      require_equal(grads_of(*module), expected);
    }
  }
}

TEST_CASE("a gradient under no_sync that zero_grad dropped is no use of its parameter") {
  const double cap = GENERATE(from_range(bucket_caps()));
  const bool rank_0_uses = GENERATE(false, true);
  CAPTURE(cap, rank_0_uses);
  Branches module, reference;
  DistributedDataParallel model(module, group(), find_unused(cap));
  for (int round = 0; round < 3; ++round) {
    {
      const auto local = model.no_sync();
      model.forward(batch_of(rank(), 50 + round, 4), true).sum().backward();
    }
    model.zero_grad();
    model.forward(batch_of(rank(), round, 4), rank_0_uses && rank() == 0).sum().backward();
    const auto expected = mean_reference(reference, [&](Branches& plain) {
      torch::Tensor sum = torch::zeros({}, on_device());
      for (int r = 0; r < world(); ++r) {
        sum = sum + plain->forward(batch_of(r, round, 4), rank_0_uses && r == 0).sum();
      }
      return sum;
    });
    require_equal(grads_of(*module), expected);
    model.zero_grad();
  }
}

TEST_CASE(
    "static_graph finds unused parameters by itself, also with no_sync between the first steps") {
  for (const double cap : bucket_caps()) {
    for (const bool find : {false, true}) {
      CAPTURE(cap, find);
      auto options = with_cap(cap);
      options.static_graph = true;
      options.find_unused_parameters = find;
      Branches module;
      Branches reference;
      DistributedDataParallel model(module, group(), options);
      for (int round = 0; round < 5; ++round) {
        model.zero_grad();
        reference->zero_grad();
        // Runs 0, 1, 2, … unsynchronised steps: hooks that fire in them must not be counted.
        for (int micro = 0; micro <= round; ++micro) {
          const int step = 10 * round + micro;
          std::optional<NoSync> guard;
          if (micro < round) {
            guard.emplace(model);
          }
          model.forward(batch_of(rank(), step, 4), true).sum().backward();
          (reference->forward(concatenated(step, 4), true).sum() / world()).backward();
        }
        require_equal(grads_of(*module), grads_of(*reference));
      }
      REQUIRE(model.logging_data().has_rebuilt_buckets == (world() > 1));
    }
  }
}

TEST_CASE("static_graph refuses a graph that changed") {
  DdpOptions options;
  options.static_graph = true;
  Branches module;
  DistributedDataParallel model(module, group(), options);
  model.forward(batch_of(rank(), 0, 4), false).sum().backward();
  REQUIRE_THROWS_WITH(model.forward(batch_of(rank(), 1, 4), true).sum().backward(),
                      Catch::Contains("some.") && Catch::Contains("static_graph"));
}

TEST_CASE("without find_unused_parameters a missing gradient raises at the next forward, by name") {
  Branches module;
  DistributedDataParallel model(module, group());
  model.forward(batch_of(rank(), 0, 4), true).sum().backward();
  REQUIRE_THROWS_WITH(model.forward(batch_of(rank(), 1, 4), true),
                      Catch::Contains("never.weight") && Catch::Contains("never.bias") &&
                          Catch::Contains("find_unused_parameters"));
}

namespace {

struct Pair {
  torch::Tensor left;
  torch::Tensor right;
};
void for_each_tensor(Pair& pair, const TensorVisitor& visit) {
  visit(pair.left);
  visit(pair.right);
}
struct Opaque {
  torch::Tensor tensor;
};

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    left = register_module("left", torch::nn::Linear(4, 2));
    right = register_module("right", torch::nn::Linear(4, 2));
    spare = register_module("spare", torch::nn::Linear(4, 2));
    to(context().device());
  }
  Pair as_struct(const torch::Tensor& x) { return {left(x), right(x)}; }
  torch::nn::Linear left{nullptr}, right{nullptr}, spare{nullptr};
};

struct TupleHeadsImpl : TwoHeadsImpl {
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor x, const torch::Tensor& scale) {
    return {left(x * scale), right(x)};
  }
};
TORCH_MODULE(TupleHeads);
struct VectorHeadsImpl : TwoHeadsImpl {
  std::vector<torch::Tensor> forward(torch::Tensor x) { return {left(x), right(x)}; }
};
TORCH_MODULE(VectorHeads);
struct StructHeadsImpl : TwoHeadsImpl {
  Pair forward(torch::Tensor x) { return as_struct(x); }
};
TORCH_MODULE(StructHeads);
struct OpaqueHeadsImpl : TwoHeadsImpl {
  Opaque forward(torch::Tensor x) { return {left(x) + right(x)}; }
};
TORCH_MODULE(OpaqueHeads);

// Both heads get gradients of ones, the spare head none.
template <typename Heads>
void require_head_gradients(Heads& heads) {
  const auto expected = torch::full({2}, 3.0, on_device());
  REQUIRE(torch::equal(heads->left->bias.grad(), expected));
  REQUIRE(torch::equal(heads->right->bias.grad(), expected));
  REQUIRE_FALSE(heads->spare->bias.grad().defined());
}

}  // namespace

TEST_CASE("outputs may be tuples, vectors and structs; inputs may be several") {
  const auto x = batch_of(rank(), 0, 4);
  {
    TupleHeads heads;
    DistributedDataParallel model(heads, group(), find_unused(25));
    auto [left, right] = model.forward(x, torch::ones({}, on_device()));
    (left.sum() + right.sum()).backward();
    require_head_gradients(heads);
  }
  {
    VectorHeads heads;
    DistributedDataParallel model(heads, group(), find_unused(25));
    auto outputs = model.forward(x);
    (outputs[0].sum() + outputs[1].sum()).backward();
    require_head_gradients(heads);
  }
  {
    StructHeads heads;
    DistributedDataParallel model(heads, group(), find_unused(25));
    auto outputs = model.forward(x);
    (outputs.left.sum() + outputs.right.sum()).backward();
    require_head_gradients(heads);
  }
}

TEST_CASE("an output that the loss does not use leaves what it alone reaches unused") {
  for (const bool first_head : {true, false}) {
    CAPTURE(first_head);
    TupleHeads heads;
    DistributedDataParallel model(heads, group(), find_unused(1.0 / (1 << 20)));
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      const auto x = batch_of(rank(), step, 4);
      auto [left, right] = model.forward(x, torch::ones({}, on_device()));
      (first_head ? left : right).sum().backward();
      const auto& used = first_head ? heads->left : heads->right;
      const auto& left_out = first_head ? heads->right : heads->left;
      const auto mean = concatenated(step, 4).sum(0).unsqueeze(0).expand({2, 4}) / world();
      REQUIRE(torch::equal(used->weight.grad(), mean));
      REQUIRE_FALSE(left_out->weight.grad().defined());
      if (step == 2) {
        REQUIRE_THROWS_WITH((first_head ? right : left).sum().backward(),
                            Catch::Contains("second backward after a forward"));
      }
    }
  }
}

TEST_CASE("ranks may leave out different outputs, or all that have parameters") {
  TupleHeads heads;
  DistributedDataParallel model(heads, group(), find_unused(25));
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    auto scale = torch::ones({}, on_device()).requires_grad_();
    auto [left, right] = model.forward(batch_of(rank(), step, 4), scale);
    // Rank 0 uses the left head and the others the right one.
    (rank() == 0 ? left : right).sum().backward();
    REQUIRE(torch::equal(heads->left->bias.grad(), torch::full({2}, 3.0 / world(), on_device())));
    REQUIRE(heads->right->bias.grad().defined() == (world() > 1));
    REQUIRE_FALSE(heads->spare->bias.grad().defined());
  }
}

TEST_CASE("torch::autograd::grad of an output ends no reduction") {
  TupleHeads heads;
  DistributedDataParallel model(heads, group(), find_unused(25));
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    auto x = batch_of(rank(), step, 4).requires_grad_();
    auto [left, right] = model.forward(x, torch::ones({}, on_device()));
    torch::autograd::grad({left.sum()}, {x}, {}, /*retain_graph=*/true);
    (left.sum() + right.sum()).backward();
    REQUIRE(torch::equal(heads->left->bias.grad(), torch::full({2}, 3.0, on_device())));
  }
}

TEST_CASE("find_unused_parameters says what lacks where forward returns a parameter alone") {
  auto weight = integers({4, 2}, 3).requires_grad_();
  DataParallelModel model({.parameters = {{"weight", weight}}}, group(), find_unused(25));
  REQUIRE_THROWS_WITH(model.prepare_for_backward({weight}),
                      Catch::Contains("returned only parameters,"));
}

TEST_CASE("a type without for_each_tensor compiles, and find_unused_parameters names it") {
  OpaqueHeads heads;
  DistributedDataParallel model(heads, group(), find_unused(25));
  REQUIRE_THROWS_WITH(model.forward(batch_of(rank(), 0, 4)),
                      Catch::Contains("Opaque") && Catch::Contains("for_each_tensor"));
}

TEST_CASE("a torch::jit::Module is wrapped like any other") {
  torch::jit::Module module("m");
  module.register_parameter("weight", integers({4, 2}, 3).requires_grad_(), false);
  module.register_parameter("spare", integers({2}, 4).requires_grad_(), false);
  module.define("def forward(self, x):\n  return torch.mm(x, self.weight)\n");
  DistributedDataParallel model(module, group(), find_unused(25));
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    model.forward(batch_of(rank(), step, 4)).toTensor().sum().backward();
    const auto expected = concatenated(step, 4).sum(0).unsqueeze(1).expand({4, 2}) / world();
    REQUIRE(torch::equal(module.attr("weight").toTensor().grad(), expected));
    REQUIRE_FALSE(module.attr("spare").toTensor().grad().defined());
  }
}

TEST_CASE("a bare list of parameters is reduced after prepare_for_backward") {
  auto weight = integers({4, 2}, 3).requires_grad_();
  auto spare = integers({2}, 4).requires_grad_();
  DataParallelModel model({.parameters = {{"weight", weight}, {"spare", spare}}}, group(),
                          find_unused(25));
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    auto y = torch::mm(batch_of(rank(), step, 4), weight);
    model.prepare_for_backward({y});
    y.sum().backward();
    REQUIRE(torch::equal(weight.grad(),
                         concatenated(step, 4).sum(0).unsqueeze(1).expand({4, 2}) / world()));
    REQUIRE_FALSE(spare.grad().defined());
  }
}
