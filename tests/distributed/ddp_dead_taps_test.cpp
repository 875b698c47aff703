// SPDX-License-Identifier: Apache-2.0
// Taps that nothing reads are left behind, and nobody who looks can tell.
#include "ddp/ops/conv2d.hpp"
#include "ddp/ops/filter_taps.hpp"
#include "ddp/optim/ema.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/join.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

// Where a step's rounding differs: each of PyTorch's updates rounds to float32, ours rounds once.
constexpr double kUlps = 16.0;

// Over 1x1 pixels one tap is live, over 2x2 with stride 2 four, over more all nine.
struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    strided = register_parameter("strided", filter(1));
    centre = register_parameter("centre", filter(2));
    centre_bias = register_parameter("centre_bias", torch::full({8}, 0.25));
    to(context().device());
  }
  static at::Tensor filter(int64_t seed) {
    return (integers({8, 8, 3, 3}, seed).cpu() / 16.0).contiguous(at::MemoryFormat::ChannelsLast);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const bool product = x.size(2) == 2;
    const auto form = product ? ops::Conv2dAlgorithm::Product : ops::Conv2dAlgorithm::Library;
    const auto hidden = torch::tanh(ops::conv2d(x, strided, 2, 1, form));
    if (by_hand) {
      ops::bring_up_to_date(centre);
      // Of every tap, which no forward over 1x1 pixels is.
      return torch::conv2d(hidden.expand({-1, -1, 3, 3}), centre) + centre_bias.view({1, 8, 1, 1});
    }
    return ops::conv2d(hidden, centre, 1, 1, form) + centre_bias.view({1, 8, 1, 1});
  }
  torch::Tensor strided, centre, centre_bias;
  bool by_hand = false;  // the second convolution is no op of libddp
};
TORCH_MODULE(ConvNet);

OptimizerOptions rule(double momentum, bool nesterov, bool skip, bool overlap = false) {
  OptimizerOptions options;
  options.momentum = momentum;
  options.nesterov = nesterov;
  options.weight_decay = 0.05;
  options.groups = {{.patterns = {"centre"}, .lr_scale = 0.5, .weight_decay = 0.2}};
  options.implementation = OptimizerImplementation::Flat;
  options.skip_dead_taps = skip;
  options.overlap_backward = overlap;
  return options;
}

struct Run {
  explicit Run(const OptimizerOptions& options)
      : model(module, group()), optimizer(make_optimizer(model, options)) {}

  void step(int index, int64_t size = 2) {
    const double lr = 0.1 / (1 + index % 7);
    const auto x = integers({2, 8, size, size}, 1000 * (index + 1) + rank());
    model.zero_grad();
    auto loss = (model.forward(x) / 8.0).square().mean();
    if (begins) {
      optimizer.begin_step({.lr = lr});
    }
    loss.backward();
    optimizer.step(StepScalars{.lr = lr, .found_inf = skipped(index)});
  }
  StepScalar skipped(int index) const {
    return begins ? StepScalar() : StepScalar(index % 11 == 5 ? 1.0 : 0.0);
  }

  ConvNet module;
  DistributedDataParallel<ConvNet> model;
  AnyOptimizer optimizer;
  bool begins = false;
};

const char* const kLateUse = "or set it to false";

void require_close(const StateDict& ours, const StateDict& expected) {
  REQUIRE(ours.tensors.size() == expected.tensors.size());
  for (const auto& [key, tensor] : expected.tensors) {
    INFO(key);
    CHECK(optim_test::ulps(ours.tensors.at(key), tensor) <= kUlps);
  }
}

}  // namespace

TEST_CASE("taps that nothing reads are left behind until somebody looks") {
  const bool nesterov = GENERATE(false, true);
  const double momentum = nesterov ? 0.9 : GENERATE(0.0, 0.9);
  const bool overlap = GENERATE(false, true);
  CAPTURE(nesterov, momentum, overlap);
  Run skips(rule(momentum, nesterov, true, overlap));
  Run plain(rule(momentum, nesterov, false, overlap));
  skips.begins = plain.begins = overlap;
  const auto first = skips.module->centre.detach().clone();
  for (int index = 0; index < 100; ++index) {
    skips.step(index);
    plain.step(index);
    // What the model computes with is the same, bit for bit.
    REQUIRE(torch::equal(skips.module->centre.detach().select(3, 1).select(2, 1),
                         plain.module->centre.detach().select(3, 1).select(2, 1)));
  }
  CHECK(torch::equal(skips.module->centre.detach().select(3, 0), first.select(3, 0)));
  CHECK_FALSE(torch::equal(skips.module->centre.detach().select(3, 1), first.select(3, 1)));
  require_close(skips.model.state_dict(), plain.model.state_dict());
  CHECK_FALSE(torch::equal(skips.module->centre.detach().select(3, 0), first.select(3, 0)));
  require_close(skips.optimizer.state_dict(), plain.optimizer.state_dict());
  // They stay behind after that, from where they are.
  skips.step(100);
  plain.step(100);
  require_close(skips.model.state_dict(), plain.model.state_dict());
}

TEST_CASE("forwards over more pixels read what they would have read") {
  Run skips(rule(0.9, true, true));
  Run plain(rule(0.9, true, false));
  const auto x = integers({2, 8, 6, 6}, 3) / 4.0;
  for (int index = 0; index < 30; ++index) {
    if (index == 20 && world() > 1) {
      REQUIRE_THROWS_WITH(skips.step(index, 6), Catch::Contains(kLateUse));
      return;
    }
    skips.step(index, index < 20 ? 2 : 6);
    plain.step(index, index < 20 ? 2 : 6);
    if (index == 12) {
      const torch::NoGradGuard no_grad;
      CHECK(torch::allclose(skips.module->forward(x), plain.module->forward(x), 1e-5, 1e-6));
    }
  }
  for (int index = 30; index < 40; ++index) {  // and back
    skips.step(index);
    plain.step(index);
  }
  const auto ours = skips.module->named_parameters();
  for (const auto& item : plain.module->named_parameters()) {
    INFO(item.key());  // no longer left behind: nobody has to ask
    CHECK(optim_test::ulps(ours[item.key()], item.value()) <= kUlps);
  }
}

TEST_CASE("averages, loaded weights and the end of an optimizer find nothing behind") {
  Run plain(rule(0.9, false, false));
  {
    Run averaged(rule(0.9, false, true));
    for (int index = 0; index < 5; ++index) {
      averaged.step(index);
      plain.step(index);
    }
    Ema ema(averaged.model, {.decay = 0.5});
    Ema expected(plain.model, {.decay = 0.5});
    require_close(ema.state_dict(), expected.state_dict());
    for (int index = 5; index < 10; ++index) {
      averaged.step(index);
      plain.step(index);
      if (index < 8) {
        ema.update();
        expected.update();
      }
    }
    require_close(ema.state_dict(), expected.state_dict());
    {
      const auto swap = ema.swap_in();
      ops::bring_up_to_date(averaged.module->centre);  // as any reader does
      CHECK(torch::equal(averaged.module->centre.detach(), ema.state_dict().tensors.at("centre")));
    }
    require_close(averaged.model.state_dict(), plain.model.state_dict());
  }
  Run skips(rule(0.9, false, true));
  for (int index = 0; index < 10; ++index) {
    skips.step(index + 3);
  }
  const auto saved_model = optim_test::deep_copy(plain.model.state_dict());
  const auto saved_optimizer = optim_test::deep_copy(plain.optimizer.state_dict());
  skips.model.load_state_dict(saved_model);
  skips.optimizer.load_state_dict(saved_optimizer);
  for (int index = 10; index < 20; ++index) {
    skips.step(index);
    plain.step(index);
  }
  skips.optimizer = make_optimizer(skips.model, rule(0.9, false, false));
  const auto ours = skips.module->named_parameters();
  for (const auto& item : plain.module->named_parameters()) {
    INFO(item.key());
    CHECK(optim_test::ulps(ours[item.key()], item.value()) <= kUlps);
  }
}

// The gradient of a tap is zero after its reduction only where it is on all ranks.
TEST_CASE("what is left behind is what no rank reads") {
  if (world() == 1) {
    return;
  }
  Run skips(rule(0.9, true, true));
  Run plain(rule(0.9, true, false));
  for (int index = 0; index < 12; ++index) {
    const int64_t size = rank() == 1 ? 6 : 2;
    skips.step(index, size);
    plain.step(index, size);
  }
  const auto ours = skips.module->named_parameters();
  for (const auto& item : plain.module->named_parameters()) {
    INFO(item.key());
    CHECK(torch::equal(ours[item.key()].detach(), item.value().detach()));
    auto all = torch::empty({world(), item.value().numel()}, on_device());
    group()->all_gather(all, item.value().detach().contiguous().flatten())->wait();
    CHECK(torch::equal(all[0], all[1]));
  }
}

TEST_CASE("a rank whose images become larger than any were says so") {
  Run skips(rule(0.9, true, true));
  for (int index = 0; index < 8; ++index) {
    if (index == 7 && rank() == 1) {
      REQUIRE_THROWS_WITH(skips.step(index, 6),
                          Catch::Contains("taps of strided") && Catch::Contains("set it to false"));
    } else {
      skips.step(index);
    }
  }
}

TEST_CASE("gradients of ops that know nothing of taps are not dropped") {
  const bool overlap = GENERATE(false, true);
  CAPTURE(overlap);
  Run skips(rule(0.9, true, true, overlap));
  Run plain(rule(0.9, true, false, overlap));
  skips.begins = plain.begins = overlap;
  for (int index = 0; index < 12; ++index) {
    skips.module->by_hand = plain.module->by_hand = index > 5;
    if (index == 6 && world() > 1) {
      REQUIRE_THROWS_WITH(skips.step(index), Catch::Contains(kLateUse));
      return;
    }
    skips.step(index);
    plain.step(index);
    require_close(skips.model.state_dict(), plain.model.state_dict());
  }
}

TEST_CASE("ranks that make no step in a join have their say after it") {
  Run skips(rule(0.9, true, true));
  Run plain(rule(0.9, true, false));
  for (Run* run : {&skips, &plain}) {
    join(run->model, [&] {
      for (int index = 0; index < (rank() == 0 ? 3 : 0); ++index) {
        run->step(index);
      }
    });
    for (int index = 3; index < 10; ++index) {
      run->step(index);
    }
  }
  CHECK_FALSE(torch::equal(skips.module->centre.detach(), plain.module->centre.detach()));
  require_close(skips.model.state_dict(), plain.model.state_dict());
}

// What is put off differs from rank to rank there: by steps, and by who looked.
TEST_CASE("weights sent from one rank to all are whole") {
  if (world() == 1) {
    return;
  }
  Run skips(rule(0.0, false, true));
  Run plain(rule(0.0, false, false));
  for (Run* run : {&skips, &plain}) {
    run->step(0);
    run->step(1);
    join(run->model, [&] {
      for (int index = 2; index < (rank() == 0 ? 5 : 2); ++index) {
        run->step(index);
      }
    });
  }
  require_close(skips.model.state_dict(), plain.model.state_dict());
  for (Run* run : {&skips, &plain}) {
    run->step(6);
    if (rank() == 0) {
      run->model.state_dict();
    }
    run->model.sync_module_states();
  }
  require_close(skips.model.state_dict(), plain.model.state_dict());
}

TEST_CASE("dead taps that cannot be skipped are refused") {
  ConvNet module;
  DistributedDataParallel<ConvNet> model(module, group());
  OptimizerOptions options = rule(0.9, false, true);
  REQUIRE_THROWS_WITH(make_optimizer(model.named_parameters(), options),
                      Catch::Contains("optimizer.skip_dead_taps=true cannot be had") &&
                          Catch::Contains("not a DistributedDataParallel"));
  options.implementation = OptimizerImplementation::List;
  REQUIRE_THROWS_WITH(make_optimizer(model, options), Catch::Contains("implementation is list"));
  options.implementation = OptimizerImplementation::Auto;
  options.dampening = 0.5;
  REQUIRE_THROWS_WITH(make_optimizer(model, options), Catch::Contains("dampening"));
}
