// SPDX-License-Identifier: Apache-2.0
// Checks and broadcasts at construction, and buffers.
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

// A model of one parameter; a test may describe it differently on rank 1.
ModelTensors one_parameter(const std::string& name, const torch::Tensor& tensor,
                           bool requires_grad = true) {
  return {.parameters = {{"first", torch::zeros({2}, on_device()).requires_grad_()},
                         {name, tensor.detach().clone().set_requires_grad(requires_grad)}}};
}

void require_mismatch(const ModelTensors& tensors, const DdpOptions& options,
                      const std::string& needle) {
  try {
    const DataParallelModel model(tensors, group(), options);
    FAIL("no mismatch was noticed: " << needle);
  } catch (const MismatchError& error) {
    INFO(error.what());
    REQUIRE(std::string(error.what()).find(needle) != std::string::npos);
    REQUIRE(std::string(error.what()).find("rank 1") != std::string::npos);
    REQUIRE(std::string(error.what()).find("rank 0") != std::string::npos);
  }
}

struct CounterImpl : torch::nn::Module {
  CounterImpl() {
    weight = register_parameter("weight", torch::ones({2}));
    seen = register_buffer("seen", torch::zeros({1}));
    count = register_buffer("count", torch::zeros({1}, torch::kLong));
    to(context().device());
  }
  torch::Tensor forward(const torch::Tensor& x) {
    seen_at_begin = {seen.item<double>(), count.item<double>()};
    if (is_training()) {
      const torch::NoGradGuard no_grad;
      seen.add_(1 + rank());
      count.add_(1 + rank());
    }
    return x * weight;
  }
  torch::Tensor weight, seen, count;
  std::vector<double> seen_at_begin;
};
TORCH_MODULE(Counter);

void set_buffers(Counter& module, int64_t value) {
  const torch::NoGradGuard no_grad;
  module->seen.fill_(value);
  module->count.fill_(value);
}

}  // namespace

TEST_CASE("ranks that differ are told the first difference, all of them") {
  if (world() == 1) {
    return;
  }
  const bool odd = rank() == 1;
  const auto base = torch::zeros({2, 3, 4, 4}, on_device());
  const DdpOptions options;
  require_mismatch(one_parameter(odd ? "b" : "a", base), options, "parameter b");
  require_mismatch(one_parameter("a", odd ? base.view({3, 2, 4, 4}) : base), options,
                   "[3, 2, 4, 4]");
  require_mismatch(one_parameter("a", odd ? base.to(at::MemoryFormat::ChannelsLast) : base),
                   options, "strides");
  require_mismatch(one_parameter("a", odd ? base.to(torch::kHalf) : base), options, "Half");
  require_mismatch(one_parameter("a", base, !odd), options, "requires_grad false");
  auto with_more = one_parameter("a", base);
  if (odd) {
    with_more.parameters.push_back({"extra", base.clone().requires_grad_()});
  }
  require_mismatch(with_more, options, "number of parameters = 3");
  auto cap = options;
  cap.bucket_cap_mb = odd ? 10 : 25;
  require_mismatch(one_parameter("a", base), cap, "ddp.bucket_cap_mb = 10");
  auto hook = options;
  hook.comm_hook = odd ? CommHookType::Bf16Compress : CommHookType::None;
  require_mismatch(one_parameter("a", base), hook, "ddp.comm_hook = bf16_compress");
}

TEST_CASE("swapped names of equal shapes are noticed") {
  if (world() == 1) {
    return;
  }
  const auto a = torch::zeros({2}, on_device()).requires_grad_();
  const auto b = torch::zeros({2}, on_device()).requires_grad_();
  require_mismatch(rank() == 1 ? ModelTensors{.parameters = {{"b", b}, {"a", a}}}
                               : ModelTensors{.parameters = {{"a", a}, {"b", b}}},
                   {}, "parameter b");
}

TEST_CASE("a module without a trainable parameter is refused") {
  Mlp module;
  for (auto& parameter : module->parameters()) {
    parameter.set_requires_grad(false);
  }
  REQUIRE_THROWS_AS(DistributedDataParallel(module, group()), SettingsError);
}

TEST_CASE("tensors that cannot be kept in step are refused by name, on all ranks") {
  const auto weight = torch::zeros({2}, on_device()).requires_grad_();
  const auto refused = [&](const NamedParameter& parameter, const NamedParameters& buffers) {
    try {
      const DataParallelModel model(
          {.parameters = {{"weight", weight}, parameter}, .buffers = buffers}, group());
    } catch (const SettingsError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was refused");
  };
  const NamedParameter good{"good", torch::ones({2}, on_device()).requires_grad_()};
  const auto expanded = torch::ones({3, 1}, on_device()).expand({3, 4});
  const auto complex = torch::ones({2}, on_device().dtype(torch::kComplexFloat));
  REQUIRE_THAT(refused({"wide", expanded.detach().requires_grad_()}, {}),
               Catch::Contains("parameter wide is an expanded tensor"));
  REQUIRE_THAT(refused(good, {{"mask", expanded}}),
               Catch::Contains("buffer mask is an expanded tensor"));
  REQUIRE_THAT(refused({"phase", complex.detach().requires_grad_()}, {}),
               Catch::Contains("parameter phase is of dtype ComplexFloat"));
  REQUIRE_THAT(refused(good, {{"spectrum", complex}}),
               Catch::Contains("buffer spectrum is of dtype ComplexFloat"));
  REQUIRE_THAT(refused({"scaled", good.tensor * 2}, {}),
               Catch::Contains("parameter scaled is not a leaf"));
  REQUIRE_THAT(refused(good, {{"plain", torch::ones({2}, on_device())}}),
               Catch::Contains("nothing was refused"));
}

TEST_CASE("construction sends rank 0's parameters and buffers, unless told not to") {
  for (const bool init_sync : {true, false}) {
    Counter module;
    {
      const torch::NoGradGuard no_grad;
      module->weight.fill_(rank() + 1);
    }
    set_buffers(module, rank() + 1);
    DdpOptions options;
    options.init_sync = init_sync;
    DistributedDataParallel model(module, group(), options);
    const double expected = init_sync ? 1 : rank() + 1;
    REQUIRE(module->weight[0].item<double>() == expected);
    REQUIRE(module->seen.item<double>() == expected);
    REQUIRE(module->count.item<int64_t>() == static_cast<int64_t>(expected));
  }
}

TEST_CASE("construction raises the version of every tensor that it overwrites") {
  Counter module;  // `count` is sent alone, because no other tensor has its dtype
  const auto versions = [&] {
    return std::vector<int64_t>{module->weight._version(), module->seen._version(),
                                module->count._version()};
  };
  const auto before = versions();
  const DistributedDataParallel model(module, group());
  const auto after = versions();
  for (std::size_t i = 0; rank() > 0 && i < before.size(); ++i) {
    CAPTURE(i);
    REQUIRE(after[i] > before[i]);
  }
}

TEST_CASE("a training forward that follows a synchronised one begins with rank 0's buffers") {
  Counter module;
  DistributedDataParallel model(module, group());
  const auto x = torch::ones({2}, on_device());
  // Returns the buffer's value at the beginning of the forward, which then changes it on each rank.
  const auto seen_by = [&](const auto& act) {
    act();
    REQUIRE(module->seen_at_begin[1] == module->seen_at_begin[0]);
    return module->seen_at_begin[0];
  };
  const auto step = [&] { model.forward(x).sum().backward(); };
  set_buffers(module, 10 * (rank() + 1));
  REQUIRE(seen_by(step) == 10);  // broadcast first
  REQUIRE(seen_by(step) == 11);
  REQUIRE(seen_by(step) == 12);
  model.eval();
  REQUIRE(seen_by(step) == 13);
  model.train();
  set_buffers(module, 20 * (rank() + 1));
  {
    const torch::NoGradGuard no_grad;
    seen_by([&] { model.forward(x); });
  }
  // The preceding forward had no gradients, so nothing is broadcast. The next one has rank 0's
  // again.
  set_buffers(module, 30 * (rank() + 1));
  REQUIRE(seen_by(step) == 30 * (rank() + 1));
  REQUIRE(seen_by(step) == 31);
  {
    auto guard = model.no_sync();
    REQUIRE(seen_by(step) == 32);
    REQUIRE(seen_by(step) == 33 + rank());
  }
  // A forward without backward.
  REQUIRE(seen_by([&] { model.forward(x); }) == 34 + 2 * rank());
  REQUIRE(seen_by(step) == 35);
}

TEST_CASE("a rank that evaluates alone begins its training with rank 0's buffers") {
  Counter module;
  DistributedDataParallel model(module, group());
  const auto x = torch::ones({2}, on_device());
  set_buffers(module, 10 * (rank() + 1));
  if (rank() == 0) {
    const torch::NoGradGuard no_grad;
    model.eval();
    model.forward(x);
    model.train();
  }
  model.forward(x).sum().backward();
  REQUIRE(module->seen_at_begin == std::vector<double>{10, 10});
}

TEST_CASE("who reads or writes buffers between forward and backward meets those that were sent") {
  Counter module;
  DistributedDataParallel model(module, group());
  const auto x = torch::ones({2}, on_device());
  const auto forward = [&] { return model.forward(x).sum(); };
  const auto seen = [&] { return module->seen.item<double>(); };
  const auto in_state = [&] { return model.state_dict().tensors.at("seen").item<double>(); };
  forward().backward();
  set_buffers(module, 10);
  forward();  // rank 0 broadcasts 11, and no backward follows
  CHECK(in_state() == 11);
  forward();
  model.eval();
  forward();
  CHECK(module->seen_at_begin[0] == 12);
  model.train();

  forward();
  auto state = model.state_dict();
  state.tensors.at("seen") = torch::full({1}, 50.0, on_device());
  forward();
  model.load_state_dict(state);
  forward();
  CHECK(module->seen_at_begin[0] == 50);

  const auto loss = forward();
  set_buffers(module, 60 + rank());
  model.sync_buffers();
  loss.backward();
  CHECK(seen() == 60);
}

TEST_CASE("broadcast_buffers before_eval and off") {
  const auto x = torch::ones({2}, on_device());
  for (const auto when : {BroadcastBuffers::BeforeEval, BroadcastBuffers::Off}) {
    Counter module;
    DdpOptions options;
    options.broadcast_buffers = when;
    DistributedDataParallel model(module, group(), options);
    set_buffers(module, rank() + 1);
    model.forward(x).sum().backward();
    REQUIRE(module->seen.item<double>() == 2 * (rank() + 1));
    model.eval();
    REQUIRE(module->seen.item<double>() ==
            (when == BroadcastBuffers::BeforeEval ? 2 : 2 * (rank() + 1)));
  }
}

TEST_CASE("a state without the frozen parameters knows which they were") {
  const auto wrap = [](Mlp& module) {
    module->first->weight.set_requires_grad(false);
    module->second->weight.set_requires_grad(false);
    auto model = std::make_unique<DistributedDataParallel<Mlp>>(module, group());
    model->leave_frozen_out_of_state();
    return model;
  };
  Mlp module, same, other(8);
  const auto state = wrap(module)->state_dict();
  REQUIRE(state.tensors.size() == 4);
  REQUIRE(state.tensors.count("first.weight") == 0);
  REQUIRE(state.tensors.count("first.bias") == 1);

  auto reloaded = wrap(same);
  {
    const torch::NoGradGuard no_grad;
    same->first->bias.add_(1);  // trainable, so not part of the base
  }
  reloaded->load_state_dict(state);
  REQUIRE(torch::equal(same->first->bias, module->first->bias));
  const auto fingerprint = reloaded->compute_frozen_fingerprint();
  REQUIRE(reloaded->frozen_fingerprint() == fingerprint);
  {
    const torch::NoGradGuard no_grad;
    same->second->weight[0][0] += 1;
  }
  REQUIRE(reloaded->compute_frozen_fingerprint() != fingerprint);
  // The base is read only once, because reading a large one takes a while.
  REQUIRE(reloaded->frozen_fingerprint() == fingerprint);
  REQUIRE((reloaded->state_dict().values == state.values));

  const auto before = other->first->bias.clone();
  REQUIRE_THROWS_WITH(wrap(other)->load_state_dict(state), Catch::Contains("over another base"));
  REQUIRE(torch::equal(other->first->bias, before));
  DistributedDataParallel<Mlp> whole(Mlp(), group());
  REQUIRE_THROWS_WITH(wrap(same)->load_state_dict(whole.state_dict()),
                      Catch::Contains("has the whole model"));
}

TEST_CASE("state_dict and load_state_dict") {
  Mlp module;
  Mlp other(9);
  DistributedDataParallel model(module, group());
  DistributedDataParallel other_model(other, group());
  other_model.load_state_dict(model.state_dict());
  REQUIRE(torch::equal(module->third->weight, other->third->weight));

  auto missing = model.state_dict();
  missing.tensors.erase("second.bias");
  REQUIRE_THROWS_WITH(other_model.load_state_dict(missing), Catch::Contains("second.bias"));
  auto reshaped = model.state_dict();
  reshaped.tensors["second.bias"] = torch::zeros({99});
  REQUIRE_THROWS_WITH(other_model.load_state_dict(reshaped), Catch::Contains("second.bias"));
  auto extra = model.state_dict();
  extra.tensors["fourth"] = torch::zeros({1});
  REQUIRE_THROWS_WITH(other_model.load_state_dict(extra), Catch::Contains("fourth"));
}
