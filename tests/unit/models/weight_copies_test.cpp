// SPDX-License-Identifier: Apache-2.0
// Copies that a model makes of its frozen weights, and the changes of these weights.
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/detail/model_weights.hpp"
#include "models/lora.hpp"
#include "support/catch.hpp"

namespace {

struct Change {
  std::string name;
  std::function<void(torch::Tensor& weight)> make;
};

/// Ways to change a weight, of which PyTorch's version counter misses the last two.
std::vector<Change> changes() {
  return {{"copy_", [](torch::Tensor& weight) { weight.copy_(torch::randn_like(weight)); }},
          {"mul_", [](torch::Tensor& weight) { weight.mul_(2); }},
          {"other memory", [](torch::Tensor& weight) { weight.set_data(weight * 3); }},
          {"data()",
           [](torch::Tensor& weight) {
             weight.data().mul_(2);
             models::refresh_fp8_base();
           }},
          {"a pointer", [](torch::Tensor& weight) {
             weight.data_ptr<float>()[0] = 1000;
             models::refresh_fp8_base();
           }}};
}

bool equal(const ddp::ops::Fp8Weight& a, const ddp::ops::Fp8Weight& b) {
  const auto same = [](const torch::Tensor& x, const torch::Tensor& y) {
    return torch::equal(x.to(torch::kFloat), y.to(torch::kFloat));
  };
  return same(a.values, b.values) && same(a.scales, b.scales) &&
         same(a.transposed_values, b.transposed_values) &&
         same(a.transposed_scales, b.transposed_scales);
}

torch::Tensor frozen(torch::IntArrayRef sizes) {
  return torch::randn(sizes);
}

}  // namespace

TEST_CASE("FP8 copies follow each change of a weight in their own memory, without a forward") {
  torch::manual_seed(1);
  const torch::NoGradGuard no_grad;
  for (const auto& change : changes()) {
    CAPTURE(change.name);
    auto weight = frozen({32, 16});
    models::detail::Fp8Copy copy;
    const auto held = copy.of({weight}, "layer");  // as a CUDA graph holds it
    REQUIRE(equal(held, ddp::ops::quantize_weight(weight)));
    change.make(weight);
    REQUIRE_FALSE(equal(held, ddp::ops::quantize_weight(weight)));
    ddp::ops::refresh_weight_copies();
    CHECK(equal(held, ddp::ops::quantize_weight(weight)));
    CHECK(copy.of({weight}, "layer").values.is_same(held.values));
  }
}

TEST_CASE("an FP8 copy of another parameter over the same memory is made anew") {
  const torch::NoGradGuard no_grad;
  auto weight = frozen({32, 16});
  auto other = torch::empty({0});
  other.set_(weight.storage(), 0, weight.sizes(), weight.strides());
  while (weight._version() <= other._version()) {
    weight.mul_(1);
  }
  models::detail::Fp8Copy copy;
  copy.of({weight}, "layer");
  while (other._version() < weight._version()) {
    other.mul_(2);
  }
  CHECK(equal(copy.of({other}, "layer"), ddp::ops::quantize_weight(other)));
}

TEST_CASE("an FP8 copy follows its weight also after a first conversion that failed") {
  const torch::NoGradGuard no_grad;
  auto weight = torch::full({32, 16}, NAN);
  models::detail::Fp8Copy copy;
  REQUIRE_THROWS_WITH(copy.of({weight}, "layer"), Catch::Contains("infinite or NaN"));
  weight.copy_(frozen({32, 16}));
  const auto held = copy.of({weight}, "layer");
  weight.mul_(2);
  ddp::ops::refresh_weight_copies();
  CHECK(equal(held, ddp::ops::quantize_weight(weight)));
}

TEST_CASE("layers with an FP8 base compute with changed weights, alone and joined") {
  torch::manual_seed(2);
  const torch::NoGradGuard no_grad;
  for (const auto& change : changes()) {
    for (const bool joined : {false, true}) {
      CAPTURE(change.name, joined);
      std::vector<models::Linear> layers;
      for (int i = 0; i < 2; ++i) {
        models::Linear layer(16, 32, /*with_bias=*/false);
        layer->weight.copy_(frozen({32, 16}));
        layer->add_lora({.rank = 4, .dropout = 0, .fp8_base = true});
        layers.push_back(layer);
      }
      const models::JoinedLinears both(joined ? layers : std::vector{layers[0]});
      const auto x = torch::randn({3, 16});
      const auto run = [&] { return joined ? both.forward(x) : layers[0]->forward(x); };
      const auto before = run();
      change.make(layers[0]->weight);
      const auto after = run();
      CHECK_FALSE(torch::equal(before, after));
      const auto wanted =
          ddp::ops::lora_linear(x, layers[0]->weight, layers[0]->lora_a, layers[0]->lora_b,
                                {.fp8 = ddp::ops::quantize_weight(layers[0]->weight)});
      CHECK(torch::allclose(after.narrow(1, 0, 32), wanted, 1e-5, 1e-5));
    }
  }
}

TEST_CASE("an adapter that comes or is merged, and a copy in other memory, invalidate all graphs") {
  const torch::NoGradGuard no_grad;
  models::Linear layer(16, 32, /*with_bias=*/false);
  layer->weight.fill_(1);
  auto before = ddp::ops::graph_invalidations();
  const auto has_changed = [&] {
    const auto now = ddp::ops::graph_invalidations();
    return std::exchange(before, now) != now;
  };
  layer->add_lora({.rank = 4, .dropout = 0, .fp8_base = true});
  CHECK(has_changed());
  layer->forward(torch::ones({1, 16}));
  CHECK_FALSE(has_changed());
  layer->weight.set_data(torch::ones({48, 16}));  // the copy's memory does not fit
  ddp::ops::refresh_weight_copies();
  CHECK(has_changed());
  layer->weight.set_data(torch::ones({32, 16}));
  layer->merge_lora();
  CHECK(has_changed());
}
