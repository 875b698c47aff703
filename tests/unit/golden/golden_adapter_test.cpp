// SPDX-License-Identifier: Apache-2.0
// An adapter that an earlier commit wrote (tests/golden/make_checkpoint_golden.cpp) loads with
// every bit.
#include "models/pretrained/peft_adapter.hpp"

#include "ddp/core/error.hpp"
#include "golden/checkpoint_formula.hpp"
#include "support/catch.hpp"
#include "support/same_bits.hpp"

namespace {

const std::string kGoldenAdapter = std::string(DDP_GOLDEN_DIR) + "/checkpoints/adapter";

/// The base, filled as when the adapter was saved.
struct GoldenBase : torch::nn::Module {
  GoldenBase()
      : q_proj(register_module("q_proj", models::Linear(6, 4, /*with_bias=*/true))),
        down_proj(register_module("down_proj", models::Linear(4, 6, /*with_bias=*/false))) {
    const torch::NoGradGuard no_grad;
    for (int64_t salt = 0; auto& item : named_parameters()) {
      item.value().copy_(
          golden::filled(item.value().sizes(), [&](int64_t i) { return golden::value(i, salt); }));
      ++salt;
    }
  }
  models::Linear q_proj, down_proj;
};

void check_golden_adapter(const GoldenBase& module) {
  int64_t salt = 40;
  for (const auto& layer : {module.q_proj, module.down_proj}) {
    CHECK(layer->lora_scale() == 3);
    for (const auto& matrix : {layer->lora_a, layer->lora_b}) {
      CHECK(testing::same_bits(matrix.detach(), golden::filled(matrix.sizes(), [&](int64_t i) {
                                 return golden::value(i, salt);
                               })));
      ++salt;
    }
  }
}

}  // namespace

TEST_CASE("an earlier commit's adapter loads into a bare base and into an adapter") {
  GoldenBase bare;
  models::require_base(kGoldenAdapter, models::base_identity(bare));
  CHECK(models::add_adapter(bare, kGoldenAdapter).layers ==
        std::vector<std::string>{"q_proj", "down_proj"});
  check_golden_adapter(bare);

  GoldenBase adapted;
  const auto saved = models::read_adapter(kGoldenAdapter);
  models::add_lora(adapted, saved.lora);
  models::load_adapter(adapted, kGoldenAdapter);
  check_golden_adapter(adapted);
}

TEST_CASE("an earlier commit's adapter keeps its settings and names its base") {
  const auto saved = models::read_adapter(kGoldenAdapter);
  CHECK(saved.lora.rank == 2);
  CHECK(saved.lora.alpha == 6);
  CHECK(saved.lora.dropout == 0.125);
  CHECK(saved.lora.target_modules == std::vector<std::string>{"down_proj", "q_proj"});
  CHECK(saved.base_model == "a/base");
  GoldenBase base;
  CHECK(saved.base_identity == models::base_identity(base));
  base.q_proj->weight.detach()[0][0] += 1;
  CHECK_THROWS_AS(models::require_base(kGoldenAdapter, models::base_identity(base)),
                  ddp::MismatchError);
}
