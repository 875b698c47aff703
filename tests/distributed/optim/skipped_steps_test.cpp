// SPDX-License-Identifier: Apache-2.0
// State that lives from one step to the next, after a skipped step and with another loss scale: it
// is that of a run without the skipped step and without a scale, by ==.
#include <limits>

#include "ddp/amp/amp.hpp"
#include "distributed/optim/zero_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr double kLr = 0.0625;

AmpOptions scaling() {
  AmpOptions options;
  options.grad_scaling = GradScaling::On;
  options.init_scale = 1024;
  options.growth_interval = 2;
  return options;
}

struct SkippingOptimizer {
  OptimizerType type;
  OptimizerImplementation implementation;
  bool zero1 = false;
  double dampening = 0;
  bool amsgrad = false;
  bool nesterov = false;
};

std::vector<SkippingOptimizer> kinds() {
  using enum OptimizerType;
  constexpr auto kList = OptimizerImplementation::List;
  constexpr auto kFlat = OptimizerImplementation::Flat;
  return {{Sgd, kList},
          {Sgd, kList, false, 0.5},
          {Sgd, kList, false, 0, false, true},
          {Sgd, kFlat},
          {Sgd, kFlat, true},
          {Adam, kList},
          {Adam, kList, false, 0, true},
          {Adam, kFlat},
          {Adam, kFlat, true},
          {AdamW, kList},
          {AdamW, kFlat},
          {AdamW, kFlat, true},
          {Lars, kList},
          {Lars, kFlat},
          {Muon, kList},
          {Muon, kFlat},
          {Lamb, kList},
          {Lamb, kFlat}};
}

OptimizerOptions options_of(const SkippingOptimizer& kind) {
  auto options = rule(kind.type, kind.zero1);
  options.implementation = kind.implementation;
  options.dampening = kind.dampening;
  options.amsgrad = kind.amsgrad;
  options.nesterov = kind.nesterov;
  return options;
}

void scaled_step(Trainer& trainer, GradScaler& scaler, int64_t step, bool spoils, bool clips) {
  trainer.model.zero_grad();
  auto loss = trainer.model.forward(batch(step));
  if (spoils && rank() == world() - 1) {
    loss = loss * std::numeric_limits<float>::infinity();
  }
  scaler.scale(loss).backward();
  if (clips) {
    scaler.clip_and_step(*trainer.optimizer, {.lr = kLr}, 1e9);
  } else {
    scaler.step(*trainer.optimizer, kLr);
  }
  scaler.update();
}

}  // namespace

TEST_CASE("a skipped step and the loss scale leave no trace in an optimizer") {
  const bool clips = GENERATE(false, true);
  const auto dtype = clips ? torch::kBFloat16 : torch::kFloat;  // with masters, and without
  for (const SkippingOptimizer& kind : kinds()) {
    for (const int64_t skipped : {0, 1, 3}) {
      CAPTURE(kind.type, kind.implementation, kind.zero1, kind.dampening, kind.amsgrad, dtype,
              clips, skipped);
      Trainer scaled(options_of(kind), {}, dtype);
      Trainer plain(options_of(kind), {}, dtype);
      GradScaler scaler(scaling());
      for (int64_t step = 0; step < 6; ++step) {
        CAPTURE(step);
        if (step == skipped) {
          scaled_step(scaled, scaler, 40, /*spoils=*/true, clips);
        }
        scaled_step(scaled, scaler, step, /*spoils=*/false, clips);
        plain.train(step);
        require_same_weights(scaled.module, plain.module);
      }
      CHECK(scaler.get_scale() != scaling().init_scale);
      require_same_state(scaled.optimizer->state_dict(), plain.optimizer->state_dict());
    }
  }
}
