// SPDX-License-Identifier: Apache-2.0
// Calls between a backward and its optimizer step: the step stays the same, by ==.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "distributed/optim/zero_test_utils.hpp"
#include "reduce/reducer.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

struct Call {
  std::string name;
  std::function<void(Trainer&)> run;
};

torch::Tensor logged_forward(Trainer& trainer) {
  return trainer.model.forward(batch(90));
}

// Every call that may lay out the buckets again, send or load tensors, or open another pass.
std::vector<Call> calls() {
  const auto held = std::make_shared<torch::Tensor>();
  return {
      {"forward", [](Trainer& t) { logged_forward(t); }},
      {"forward whose output lives on", [held](Trainer& t) { *held = logged_forward(t); }},
      {"forward under no_sync",
       [](Trainer& t) {
         const auto local = t.model.no_sync();
         logged_forward(t);
       }},
      {"forward without gradients",
       [](Trainer& t) {
         const torch::NoGradGuard no_grad;
         logged_forward(t);
       }},
      {"frozen forward",
       [](Trainer& t) {
         t.module->weights[1].set_requires_grad(false);
         logged_forward(t);
         t.module->weights[1].set_requires_grad(true);
       }},
      {"model.load_state_dict",
       [](Trainer& t) { t.model.load_state_dict(copy_of(t.model.state_dict())); }},
      {"optimizer.load_state_dict",
       [](Trainer& t) { t.optimizer->load_state_dict(copy_of(t.optimizer->state_dict())); }},
      {"sync_module_states", [](Trainer& t) { t.model.sync_module_states(); }},
      {"sync_buffers", [](Trainer& t) { t.model.sync_buffers(); }},
      {"other memory",
       [](Trainer& t) {
         for (auto& weight : t.module->weights) {
           weight.set_data(weight.detach().clone());
         }
       }},
      {"scan", [](Trainer& t) { t.optimizer->scan_gradients(); }},
  };
}

// With `counts` a micro-step and its count wait for the synchronised backward, too.
void train(Trainer& trainer, int64_t step, bool counts, const std::function<void(Trainer&)>& call) {
  trainer.model.zero_grad();
  if (counts) {
    {
      const auto local = trainer.model.no_sync();
      trainer.model.weighted_backward(trainer.model.forward(batch(50 + step)), 2);
    }
    call(trainer);
    trainer.model.weighted_backward(trainer.model.forward(batch(step)), 2);
  } else {
    trainer.backward(step);
  }
  call(trainer);
  trainer.optimizer->step(0.0625);
}

DdpOptions layout_options(const std::string& layout) {
  auto options = with_cap(layout == "auto" ? NumberOrAuto(kAutoBuckets) : caps()[1]);
  options.static_graph = layout == "static_graph";
  options.find_unused_parameters = layout == "find_unused_parameters";
  return options;
}

}  // namespace

TEST_CASE("calls between a backward and its step change neither means nor counts nor state") {
  const std::string layout = GENERATE("limits", "auto", "static_graph", "find_unused_parameters");
  const bool zero1 = GENERATE(false, true);
  const bool counts = GENERATE(false, true);
  for (const Call& call : calls()) {
    const bool is_refused = layout == "static_graph" && call.name == "frozen forward";
    if (is_refused) {
      continue;
    }
    CAPTURE(call.name, layout, zero1, counts);
    Trainer called(rule(OptimizerType::AdamW, zero1), layout_options(layout));
    Trainer plain(rule(OptimizerType::AdamW, false));
    for (int64_t step = 0; step < 5; ++step) {
      CAPTURE(step);
      train(called, step, counts, call.run);
      train(plain, step, counts, [](Trainer&) {});
      require_same_weights(called.module, plain.module);
    }
    require_same_state(called.optimizer->state_dict(), plain.optimizer->state_dict());
    // The layout is only put off while a rank holds its part of a mean.
    logged_forward(called);
    CHECK(called.model.logging_data().has_rebuilt_buckets ==
          (world() > 1 && layout != "find_unused_parameters"));
  }
}
