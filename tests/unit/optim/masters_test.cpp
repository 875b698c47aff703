// SPDX-License-Identifier: Apache-2.0
// The float32 masters of parameters of 16 bits: they keep their low bits, and follow what other
// code writes into a parameter without being told.
#include <torch/torch.h>

#include "support/catch.hpp"
#include "unit/optim/master_twins.hpp"

using namespace optim_test;
using ddp::OptimizerImplementation;
using ddp::OptimizerType;

TEST_CASE("Masters that nobody writes keep their low bits", "[optim]") {
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  MasterTwins twins(at::kCPU, dtype, twin_rule(OptimizerType::Sgd, implementation),
                    /*special=*/true);
  twins.run_alone();
}

TEST_CASE("An update starts from what other code wrote into the parameter", "[optim]") {
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  const auto type =
      GENERATE(OptimizerType::Sgd, OptimizerType::AdamW, OptimizerType::Lars, OptimizerType::Lamb);
  MasterTwins twins(at::kCPU, dtype, twin_rule(type, implementation), type == OptimizerType::Sgd);
  CAPTURE(type);
  twins.run_with_writers();
}

TEST_CASE("Loading an optimizer's state changes no parameter", "[optim]") {
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  MasterTwins twins(at::kCPU, at::kBFloat16, twin_rule(OptimizerType::AdamW, implementation));
  for (int64_t step = 0; step < 4; ++step) {
    twins.step(step);
  }
  const ddp::StateDict saved = deep_copy(twins.of_half->state_dict());
  const at::Tensor written = twins.half[1].tensor.detach().add(1);
  write(twins.half[1].tensor, written, Writer::RawMemory);
  twins.of_half->load_state_dict(saved);
  const ddp::StateDict loaded = twins.of_half->state_dict();
  CHECK(same_bits(loaded.tensors.at("state.w0.master"), saved.tensors.at("state.w0.master")));
  CHECK(same_bits(loaded.tensors.at("state.w1.master"), written.to(at::kFloat)));
  CHECK(same_bits(loaded.tensors.at("state.w1.exp_avg"), saved.tensors.at("state.w1.exp_avg")));
  twins.of_half->step(0.0);
  CHECK(same_bits(twins.half[1].tensor.detach(), written));
}

TEST_CASE("A parameter with holes in memory follows what other code writes", "[optim]") {
  const at::Tensor storage = at::zeros({5, 8});
  ddp::NamedParameters sliced{{"w", storage.narrow(1, 0, 3).detach().requires_grad_()}};
  auto optimizer =
      ddp::make_optimizer(sliced, twin_rule(OptimizerType::Sgd, OptimizerImplementation::List));
  for (int64_t step = 0; step < 3; ++step) {
    set_gradients(sliced, step);
    optimizer->step(0.125);
    storage.fill_(3.0);
  }
  set_gradients(sliced, 3);
  optimizer->step(0.125);
  CHECK(at::equal(sliced[0].tensor.detach(), 3.0 - 0.125 * gradient({5, 3}, 0, 3)));
}
