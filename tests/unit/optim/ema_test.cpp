// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/ema.hpp"

#include <torch/torch.h>

#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::Ema;
using ddp::NamedParameters;

TEST_CASE("EMA follows its formula on exact numbers", "[optim]") {
  NamedParameters tensors{{"w", at::tensor({0.0F, 8.0F}).requires_grad_()},
                          {"half", at::tensor({1.0F}).to(at::kBFloat16).requires_grad_()},
                          {"num_batches", at::tensor({1}, at::kLong)}};
  Ema ema(tensors, {.decay = 0.75});
  for (int i = 0; i < 2; ++i) {
    tensors[0].tensor.detach().add_(16.0);
    tensors[1].tensor.detach().add_(4.0);
    tensors[2].tensor.add_(1);
    ema.update();
  }
  // w: 0 -> 4 -> 11; 8 -> 12 -> 19.  half: 1 -> 2 -> 3.75
  CHECK(at::equal(ema.averages()[0].tensor, at::tensor({11.0F, 19.0F})));
  CHECK(at::equal(ema.averages()[1].tensor, at::tensor({3.75F})));
  CHECK(at::equal(ema.averages()[2].tensor, at::tensor({3}, at::kLong)));
}

TEST_CASE("Averages of half weights keep what half numbers would lose", "[optim]") {
  const at::ScalarType dtype = GENERATE(at::kBFloat16, at::kHalf);
  NamedParameters tensors{{"w", at::ones({2}, dtype).requires_grad_()}};
  Ema ema(tensors, {.decay = 0.9999});
  tensors[0].tensor.detach().fill_(2.0);
  for (int i = 0; i < 10; ++i) {
    ema.update();  // each update moves by 1e-4, lost to rounding at 1.0 in bfloat16 or float16
  }
  CHECK(ema.averages()[0].tensor.scalar_type() == at::kFloat);
  CHECK(ema.averages()[0].tensor[0].item<double>() ==
        Approx(2.0 - std::pow(0.9999, 10)).epsilon(1e-6));
}

TEST_CASE("swap_in shows the averages and puts the very weights back", "[optim]") {
  NamedParameters tensors{{"w", weights({3, 5}, 0)},
                          {"half", weights({4}, 1).detach().to(at::kHalf).requires_grad_()}};
  Ema ema(tensors, {.decay = 0.9});
  tensors[0].tensor.detach().mul_(3.0);
  tensors[1].tensor.detach().mul_(3.0);
  ema.update();
  const at::Tensor trained = tensors[0].tensor.detach().clone();
  const at::Tensor trained_half = tensors[1].tensor.detach().clone();
  const void* memory = tensors[0].tensor.data_ptr();
  const auto check_back = [&] {
    CHECK(at::equal(tensors[0].tensor.detach(), trained));
    CHECK(at::equal(tensors[1].tensor.detach(), trained_half));
    CHECK(tensors[0].tensor.data_ptr() == memory);
  };
  {
    const auto swap = ema.swap_in();
    CHECK(at::equal(tensors[0].tensor.detach(), ema.averages()[0].tensor));
    CHECK(at::equal(tensors[1].tensor.detach(), ema.averages()[1].tensor.to(at::kHalf)));
    CHECK_FALSE(at::equal(tensors[0].tensor.detach(), trained));
    CHECK(contains(message_of([&] { ema.update(); }), "swapped in"));
    CHECK(contains(message_of([&] { ema.state_dict(); }), "swapped in"));
    CHECK(contains(message_of([&] { ema.load_state_dict({}); }), "swapped in"));
    CHECK(contains(message_of([&] { const auto second = ema.swap_in(); }), "swapped in"));
  }
  check_back();
  CHECK_THROWS_AS(
      [&] {
        auto swap = ema.swap_in();
        const auto moved = std::move(swap);
        throw std::runtime_error("evaluation failed");
      }(),
      std::runtime_error);
  check_back();
  ema.update();
}

TEST_CASE("EMA refuses a weight of another shape than its average", "[optim]") {
  NamedParameters tensors{{"w", weights({3, 5}, 0)}, {"count", at::ones({4}, at::kLong)}};
  Ema ema(tensors, {.decay = 0.9});
  for (auto& [name, tensor] : tensors) {
    const at::Tensor before = tensor.detach();
    tensor.set_data(before.narrow(0, 0, 1).clone());  // it would be broadcast
    CHECK(contains(message_of<ddp::MismatchError>([&] { ema.update(); }), "Ema: " + name));
    CHECK(contains(message_of<ddp::MismatchError>([&] { const auto swap = ema.swap_in(); }),
                   "Ema: " + name));
    tensor.set_data(before);
  }
  ema.update();
}

TEST_CASE("EMA state loads exactly and refuses what does not fit", "[optim]") {
  NamedParameters tensors{{"w", weights({3}, 0)}, {"b", weights({2}, 1)}};
  Ema ema(tensors, {.decay = 0.7});
  tensors[0].tensor.detach().mul_(0.3);
  ema.update();
  ddp::StateDict saved = ema.state_dict();
  for (auto& [key, tensor] : saved.tensors) {
    tensor = tensor.clone();
  }
  Ema other(tensors, {.decay = 0.7});
  other.load_state_dict(saved);
  CHECK(at::equal(other.averages()[0].tensor, ema.averages()[0].tensor));
  saved.tensors.erase("b");
  CHECK(contains(message_of<ddp::MismatchError>([&] { other.load_state_dict(saved); }),
                 "b is missing"));
  CHECK(
      contains(message_of<ddp::MismatchError>([&] { other.load_state_dict({}); }), "b is missing"));
  CHECK(
      contains(message_of<ddp::SettingsError>([&] { Ema(tensors, {.decay = 1.5}); }), "ema.decay"));
}
