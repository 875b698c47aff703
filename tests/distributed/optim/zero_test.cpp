// SPDX-License-Identifier: Apache-2.0
// ZeRO-1 compared with the same optimizer without it, by ==.
#include <torch/torch.h>

#include "ddp/amp/amp.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/join.hpp"
#include "distributed/optim/zero_test_utils.hpp"
#include "optim/zero/optimizer.hpp"
#include "reduce/hooks/comm_hook_table.hpp"
#include "reduce/reducer.hpp"

using namespace ddp;
using namespace ddp::test;
using ddp::detail::make_all_reduce_hook;

namespace {

AmpOptions scaled_by_4() {
  AmpOptions amp;
  amp.grad_scaling = GradScaling::On;
  amp.init_scale = 4;
  return amp;
}

}  // namespace

TEST_CASE("a sharded optimizer gives the weights and the state of a whole one") {
  const auto type = GENERATE(OptimizerType::Sgd, OptimizerType::Adam, OptimizerType::AdamW);
  const auto dtype = GENERATE(torch::kFloat, torch::kBFloat16);
  for (const double cap : caps()) {
    CAPTURE(cap, dtype);
    Trainer sharded(rule(type, true), with_cap(cap), dtype);
    Trainer whole(rule(type, false), with_cap(cap), dtype);
    for (int step = 0; step < 6; ++step) {
      CAPTURE(step);
      for (Trainer* trainer : {&sharded, &whole}) {
        trainer->model.zero_grad();
        {
          const auto local = trainer->model.no_sync();
          trainer->backward(50 + step);
        }
        auto loss = trainer->model.forward(batch(step));
        loss.backward();
        trainer->optimizer->step({.lr = 0.0625 / (1 + step), .inverse_scale = 0.5});
      }
      require_same_weights(sharded.module, whole.module);
    }
    require_same_state(sharded.optimizer->state_dict(), whole.optimizer->state_dict());
  }
}

TEST_CASE("a sharded optimizer takes a bucket without elements") {
  struct PairImpl : torch::nn::Module {
    torch::Tensor forward(int64_t step) {
      return (full * integers({5}, step)).sum() + none.to(torch::kFloat).sum();
    }
    torch::Tensor full = register_parameter("full", torch::ones({5}, on_device()));
    torch::Tensor none =
        register_parameter("none", torch::ones({2, 0}, on_device().dtype(torch::kBFloat16)));
  };
  StateDict states[2];
  torch::Tensor weights[2];
  for (const int i : {0, 1}) {
    const auto module = std::make_shared<PairImpl>();
    DistributedDataParallel model(module, group());
    const auto optimizer = make_optimizer(model, rule(OptimizerType::AdamW, i == 0));
    GradScaler scaler(scaled_by_4());
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      scaler.scale(model.forward(step)).backward();
      scaler.unscale_(*optimizer);  // on four ranks, one has nothing but padding
      clip_grad_norm_(model, 1e6);
      scaler.step(*optimizer, 0.0625);
      scaler.update();
    }
    states[i] = copy_of(optimizer->state_dict());
    weights[i] = module->full.detach();
  }
  CHECK(torch::equal(weights[0], weights[1]));
  CHECK(states[0].tensors.at("state.none.step").item<float>() == 3);
  require_same_state(states[0], states[1]);
}

TEST_CASE("a sharded optimizer takes weighted means and unused parameters") {
  for (const bool unused : {false, true}) {
    DdpOptions options;
    options.find_unused_parameters = unused;
    Trainer sharded(rule(OptimizerType::AdamW, true), options);
    Trainer whole(rule(OptimizerType::AdamW, false), options);
    for (int step = 0; step < 3; ++step) {
      for (Trainer* trainer : {&sharded, &whole}) {
        trainer->model.zero_grad();
        auto loss = trainer->model.forward(batch(step));
        if (!unused) {
          trainer->model.weighted_backward(loss, rank() == 0 ? 4 : 0);
        } else {
          loss.backward();
        }
        trainer->optimizer->step(0.0625);
      }
      require_same_weights(sharded.module, whole.module);
    }
  }
}

TEST_CASE("each rank keeps its part of the state and no more") {
  Trainer sharded(rule(OptimizerType::AdamW, true));
  sharded.train(0);
  auto bytes = torch::zeros({1}, on_device().dtype(torch::kLong));
  const auto* own = dynamic_cast<ddp::detail::ZeroOptimizer&>(*sharded.optimizer).own();
  const StateDict state = own != nullptr ? own->state_dict() : StateDict();
  for (const auto& [key, tensor] : state.tensors) {
    bytes += tensor.dim() == 0 ? 0 : static_cast<int64_t>(tensor.nbytes());
  }
  int64_t all = 0;
  for (const auto& [key, tensor] : copy_of(sharded.optimizer->state_dict()).tensors) {
    all += key.slot == "step" ? 0 : static_cast<int64_t>(tensor.nbytes());
  }
  CHECK(all == 2 * 4 * (135 + 7 + 297 + 1 + 130 + 2));  // two slots of float32
  const int64_t part = sharded.model.reducer().gradients().bucket_shard(0).numel();
  CHECK(bytes.item<int64_t>() <= 2 * 4 * part);
  group()->all_reduce(bytes)->wait();
  CHECK(bytes.item<int64_t>() == all);
}

TEST_CASE("the norm of sharded gradients, and clipping by it") {
  Trainer sharded(rule(OptimizerType::Sgd, true));
  Trainer whole(rule(OptimizerType::Sgd, false));
  for (int step = 0; step < 4; ++step) {
    torch::Tensor norms[2];
    for (const int i : {0, 1}) {
      Trainer& trainer = i == 0 ? sharded : whole;
      trainer.model.zero_grad();
      trainer.backward(step);
      const double type = step == 3 ? std::numeric_limits<double>::infinity() : 2.0;
      norms[i] = clip_grad_norm_(trainer.model, step == 0 ? 0.0 : 1.0, type);
      const auto scan = trainer.optimizer->scan_gradients({}, 0.25);
      CHECK(scan.found_inf.item<float>() == 0);
      CHECK(scan.first_non_finite.item<int>() == -1);
      CHECK(scan.clip_factor.item<double>() ==
            Approx(std::min(1.0, 0.25 / (scan.norm.item<double>() + 1e-6))).epsilon(1e-5));
      trainer.optimizer->step(0.0625);
    }
    // Sums of squares are added in another order.
    CHECK(norms[0].item<double>() == Approx(norms[1].item<double>()).epsilon(1e-6));
    for (size_t i = 0; i < whole.module->weights.size(); ++i) {
      CHECK(torch::allclose(sharded.module->weights[i], whole.module->weights[i], 1e-6, 1e-6));
    }
  }
}

TEST_CASE("sharded gradients whose squares float32 does not hold are measured and clipped") {
  const double large = std::ldexp(1.0, 80);
  Trainer plain(rule(OptimizerType::Sgd, true));
  Trainer sharded(rule(OptimizerType::Sgd, true));
  plain.model.zero_grad();
  plain.backward(0);
  const auto norm = plain.optimizer->scan_gradients().norm.item<double>();
  sharded.model.zero_grad();
  (sharded.model.forward(batch(0)) * large).backward();
  const auto scan = sharded.optimizer->scan_gradients({}, 0.25);
  CHECK(scan.norm.item<double>() == Approx(norm * large).epsilon(1e-6));
  CHECK(scan.clip_factor.item<double>() == Approx(0.25 / norm / large).epsilon(1e-6));
  CHECK(clip_grad_norm_(sharded.model, 0.25).item<double>() == Approx(norm * large).epsilon(1e-6));
  CHECK(sharded.optimizer->scan_gradients().norm.item<double>() == Approx(0.25).epsilon(1e-5));
}

TEST_CASE("the norm of sharded gradients leaves out those that the caller dropped") {
  Trainer sharded(rule(OptimizerType::Sgd, true));
  Trainer whole(rule(OptimizerType::Sgd, false));
  double norms[2];
  for (const int i : {0, 1}) {
    Trainer& trainer = i == 0 ? sharded : whole;
    trainer.model.zero_grad();
    trainer.backward(0);
    trainer.module->weights[1].mutable_grad() = torch::Tensor();
    norms[i] = clip_grad_norm_(trainer.model, 0.0).item<double>();
  }
  CHECK(norms[0] == Approx(norms[1]).epsilon(1e-6));
}

TEST_CASE("inf in one rank's part makes all ranks skip") {
  for (const bool clips : {false, true}) {
    Trainer sharded(rule(OptimizerType::AdamW, true));
    Trainer whole(rule(OptimizerType::AdamW, false));
    GradScaler scalers[] = {GradScaler(scaled_by_4()), GradScaler(scaled_by_4())};
    for (int step = 0; step < 4; ++step) {
      CAPTURE(step, clips);
      for (const int i : {0, 1}) {
        Trainer& trainer = i == 0 ? sharded : whole;
        trainer.model.zero_grad();
        auto loss = trainer.model.forward(batch(step));
        if (step == 1 && rank() == 0) {  // one element of w4 and of w5, whose gradient comes first
          for (const size_t spoilt : {4, 5}) {
            auto factor = torch::zeros_like(trainer.module->weights[spoilt]);
            factor.view({-1})[-1] = std::numeric_limits<float>::infinity();
            loss = loss + (trainer.module->weights[spoilt] * factor).sum();
          }
        }
        scalers[i].scale(loss).backward();
        if (clips) {
          const auto scan = scalers[i].clip_and_step(*trainer.optimizer, {.lr = 0.0625}, 1e6);
          CHECK(scan.found_inf.item<float>() == (step == 1 ? 1 : 0));
          CHECK(scan.first_non_finite.item<int>() == (step == 1 ? 4 : -1));
        } else {
          scalers[i].unscale_(*trainer.optimizer);
          scalers[i].step(*trainer.optimizer, 0.0625);
        }
        scalers[i].update();
      }
      require_same_weights(sharded.module, whole.module);
      CHECK(scalers[0].get_scale() == scalers[1].get_scale());
    }
    CHECK(scalers[0].get_scale() == 2);
    if (clips) {
      CHECK(sharded.optimizer->non_finite_report().num_scans == 1);
      CHECK(sharded.optimizer->non_finite_report().parameter == "w4");
    }
  }
}

TEST_CASE("a sharded step with NaN leaves nothing behind, however the step is dropped") {
  enum class Drop { Scaler, Host, Count };
  const auto drop = GENERATE(Drop::Scaler, Drop::Host, Drop::Count);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Trainer trainers[] = {Trainer(rule(OptimizerType::AdamW, true)),
                        Trainer(rule(OptimizerType::AdamW, false))};
  GradScaler scalers[] = {GradScaler(scaled_by_4()), GradScaler(scaled_by_4())};
  for (int step = 0; step < 5; ++step) {
    CAPTURE(drop, step);
    const double factor = step == 1 && rank() == 0 ? nan : 1;
    double norms[2];
    for (const int i : {0, 1}) {
      auto& [module, model, optimizer] = trainers[i];
      model.zero_grad();
      const auto loss = model.forward(batch(step));
      if (drop == Drop::Count) {
        model.weighted_backward(loss, torch::full({}, 4 * factor, on_device()));
      } else {
        (drop == Drop::Scaler ? scalers[i].scale(loss * factor) : loss * factor).backward();
      }
      if (drop == Drop::Scaler) {
        scalers[i].unscale_(*optimizer);
      }
      norms[i] = clip_grad_norm_(model, 1e6).item<double>();
      if (drop == Drop::Scaler) {
        scalers[i].step(*optimizer, 0.0625);
        scalers[i].update();
      } else if (std::isfinite(norms[i])) {
        optimizer->step(0.0625);
      }
    }
    REQUIRE(std::isfinite(norms[0]) == (step != 1));
    REQUIRE((step == 1 || norms[0] == Approx(norms[1]).epsilon(1e-6)));
    REQUIRE(scalers[0].get_scale() == scalers[1].get_scale());
    require_same_weights(trainers[0].module, trainers[1].module);
  }
}

TEST_CASE("state goes from one world size to another, and to optimizers that are whole") {
  const auto dtype = GENERATE(torch::kFloat, torch::kBFloat16);
  Trainer sharded(rule(OptimizerType::AdamW, true), with_cap(caps()[1]), dtype);
  for (int step = 0; step < 3; ++step) {
    sharded.train(step);
  }
  const StateDict model_state = copy_of(sharded.model.state_dict());
  const StateDict state = copy_of(sharded.optimizer->state_dict());
  const StateDict loaded =
      GENERATE(true, false) ? state : with_all_parts(sharded.optimizer->state_dict());
  const auto go_on = [&](Trainer& trainer) {
    trainer.model.load_state_dict(model_state);
    trainer.optimizer->load_state_dict(loaded);
    require_same_state(trainer.optimizer->state_dict(), state);
    for (int step = 3; step < 6; ++step) {
      trainer.train(step);
    }
  };
  Trainer whole(rule(OptimizerType::AdamW, false), {}, dtype);
  go_on(whole);
  Trainer again(rule(OptimizerType::AdamW, true), with_cap(caps()[2]), dtype);
  go_on(again);
  require_same_weights(again.module, whole.module);
  require_same_state(again.optimizer->state_dict(), whole.optimizer->state_dict());
  // Groups of two ranks, or of one.
  const int size = world() == 4 ? 2 : 1;
  const auto fewer = [&] { return group()->split(rank() / size, rank()); };
  Trainer sharded_fewer(rule(OptimizerType::AdamW, true), {}, dtype, fewer());
  Trainer whole_fewer(rule(OptimizerType::AdamW, false), {}, dtype, fewer());
  go_on(sharded_fewer);
  go_on(whole_fewer);
  require_same_weights(sharded_fewer.module, whole_fewer.module);
  StateDict broken = copy_of(state);
  broken.tensors.erase("state.w2.exp_avg");
  REQUIRE_THROWS_WITH(again.optimizer->load_state_dict(broken),
                      Catch::Contains("state.w2.exp_avg is missing"));
}

TEST_CASE("first sharded steps that are skipped make no state") {
  Trainer sharded(rule(OptimizerType::AdamW, true));
  Trainer whole(rule(OptimizerType::AdamW, false));
  for (int step = 0; step < 6; ++step) {
    CAPTURE(step);
    for (Trainer* trainer : {&sharded, &whole}) {
      trainer->model.zero_grad();
      auto loss = trainer->model.forward(batch(step));
      StepScalars scalars{.lr = 0.0625};
      if (step < 2) {  // the second step follows the rebuild of the buckets
        scalars.found_inf = 1.0;
      }
      loss.backward();
      trainer->optimizer->step(scalars);
    }
    require_same_weights(sharded.module, whole.module);
    require_same_state(sharded.optimizer->state_dict(), whole.optimizer->state_dict());
  }
}

TEST_CASE("one rank alone may give a parameter other memory, all of them other values") {
  const auto dtype = GENERATE(torch::kFloat, torch::kBFloat16);
  Trainer sharded(rule(OptimizerType::AdamW, true), {}, dtype);
  Trainer whole(rule(OptimizerType::AdamW, false), {}, dtype);
  for (int step = 0; step < 5; ++step) {
    CAPTURE(step);
    if (step == 2 && rank() == world() - 1) {
      for (auto& weight : sharded.module->weights) {
        weight.set_data(weight.detach().clone());
      }
    }
    for (Trainer* trainer : {&sharded, &whole}) {
      const torch::NoGradGuard no_grad;
      auto& weight = trainer->module->weights[1];
      if (step == 3) {  // new values on all ranks; next, a new tensor in the same memory
        weight.set_data(weight.detach() * 2);
      } else if (step == 4) {
        weight.set_data(weight.detach().as_strided(weight.sizes(), weight.strides()));
        weight.mul_(0.5);
      }
    }
    if (step >= 3) {  // a state saved before the next step has the new values, too
      require_same_state(sharded.optimizer->state_dict(), whole.optimizer->state_dict());
    }
    for (Trainer* trainer : {&sharded, &whole}) {
      trainer->train(step);
    }
    require_same_weights(sharded.module, whole.module);
  }
  require_same_state(sharded.optimizer->state_dict(), whole.optimizer->state_dict());
  auto& weight = sharded.module->weights[2];
  const auto turned = weight.detach().t().contiguous().t();
  if (rank() == 0) {  // one rank's mistake does not prevent saving
    weight.set_data(turned);
  }
  require_same_state(sharded.optimizer->state_dict(), whole.optimizer->state_dict());
  weight.set_data(turned);
  REQUIRE_THROWS_WITH(sharded.optimizer->scan_gradients(),
                      Catch::Contains("parameter w2 was replaced"));
}

TEST_CASE("state that is loaded beside other weights is what later steps work on") {
  Trainer sharded(rule(OptimizerType::AdamW, true), {}, torch::kBFloat16);
  Trainer whole(rule(OptimizerType::AdamW, false), {}, torch::kBFloat16);
  for (Trainer* trainer : {&sharded, &whole}) {
    trainer->train(0);
    trainer->train(1);
    const StateDict saved = copy_of(trainer->optimizer->state_dict());
    trainer->train(2);
    for (auto& weight : trainer->module->weights) {
      weight.set_data(weight.detach() * 2);
    }
    trainer->optimizer->load_state_dict(saved);
    trainer->train(3);
  }
  require_same_weights(sharded.module, whole.module);
  require_same_state(sharded.optimizer->state_dict(), whole.optimizer->state_dict());
}

TEST_CASE("what cannot be sharded is refused") {
  Pieces module;
  const auto refused = [&](OptimizerOptions options, const DdpOptions& ddp_options,
                           const std::string& reason) {
    DistributedDataParallel model(module, group(), ddp_options);
    REQUIRE_THROWS_WITH(make_optimizer(model, options), Catch::Contains(reason));
  };
  OptimizerOptions options = rule(OptimizerType::Sgd, true);
  DdpOptions hooked;
  hooked.comm_hook = CommHookType::Fp16Compress;
  refused(options, hooked, "comm_hook=none");
  options.dampening = 0.5;
  refused(options, {}, "dampening");
  refused(rule(OptimizerType::Lamb, true), {}, "lars and lamb");
  module->to(torch::kDouble);  // so no norm of parts needs more than float32
  refused(rule(OptimizerType::Sgd, true), {}, "of dtype Double");
  module->to(torch::kFloat);
  REQUIRE_THROWS_WITH(
      make_optimizer(NamedParameters{{"w2", module->weights[2]}}, rule(OptimizerType::Sgd, true)),
      Catch::Contains("not a DistributedDataParallel"));
  Trainer trainer(rule(OptimizerType::Sgd, true));
  REQUIRE_THROWS_WITH(make_optimizer(trainer.model, rule(OptimizerType::Sgd, true)),
                      Catch::Contains("already"));
  REQUIRE_THROWS_WITH(join(trainer.model, [] {}), Catch::Contains("has_batch"));
  REQUIRE_THROWS_WITH(trainer.model.register_comm_hook(make_all_reduce_hook()),
                      Catch::Contains("optimizer.zero1"));
  trainer.backward(0);
  REQUIRE_THROWS_WITH(clip_grad_norm_(trainer.model.named_parameters(), 1.0),
                      Catch::Contains("give clip_grad_norm_ the model"));
  auto other = make_optimizer(trainer.model.named_parameters(), rule(OptimizerType::Sgd, false));
  REQUIRE_THROWS_WITH(other->step(0.0625), Catch::Contains("each rank has a part only"));
  // A second backward without zero_grad() or step() before it.
  REQUIRE_THROWS_WITH(
      [&] {
        const auto local = trainer.model.no_sync();
        trainer.backward(1);
      }(),
      Catch::Contains("can be added to it"));
  trainer.optimizer->step(0.0625);
  for (const auto& weight : trainer.module->weights) {
    CHECK_FALSE(weight.grad().defined());
  }
  trainer.backward(2);
  trainer.model.zero_grad();
  trainer.backward(3);
  trainer.module->weights[1].mutable_grad() = torch::ones_like(trainer.module->weights[1]);
  REQUIRE_THROWS_WITH(trainer.optimizer->step(0.0625), Catch::Contains("gradient of w1"));
}

TEST_CASE("a backward through weights that a sharded step moved is refused") {
  const auto dtype = GENERATE(torch::kFloat, torch::kBFloat16);
  Trainer trainer(rule(OptimizerType::AdamW, true), {}, dtype);
  for (int step = 0; step < 3; ++step) {
    std::vector<torch::Tensor> old;
    for (const auto& weight : trainer.module->weights) {
      old.push_back((weight * weight).sum());
    }
    trainer.train(step);
    for (const auto& loss : old) {
      // On every rank, whichever part of the weight it moved.
      CHECK_THROWS_WITH(loss.backward(), Catch::Contains("modified by an inplace operation"));
    }
  }
}
