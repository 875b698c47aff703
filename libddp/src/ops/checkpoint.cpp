// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/language.hpp"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "ddp/detail/model_weights.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::ops {
namespace {

using Body = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

/// The states of the default generators of several devices.
class RandomStates {
 public:
  /// Of the CPU, whose draws may decide what a function computes on a GPU, and of `inputs`'
  /// devices.
  static RandomStates of_devices(at::TensorList inputs) {
    RandomStates states;
    states.add(at::kCPU);
    for (const auto& input : inputs) {
      if (input.defined()) {
        states.add(input.device());
      }
    }
    return states;
  }

  /// The same devices' states now.
  RandomStates now() const {
    RandomStates states;
    for (const auto& entry : states_) {
      states.add(entry.device);
    }
    return states;
  }
  void restore() const {
    for (const auto& [device, state] : states_) {
      auto generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  struct Entry {
    at::Device device;
    at::Tensor state;
  };

  void add(at::Device device) {
    const auto is_known = [device](const Entry& entry) { return entry.device == device; };
    if (std::none_of(states_.begin(), states_.end(), is_known)) {
      auto generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard<std::mutex> lock(generator.mutex());
      states_.push_back({device, generator.get_state()});
    }
  }

  std::vector<Entry> states_;
};

/// Restores the generators' later states, also after an exception.
class RandomStatesAs {
 public:
  explicit RandomStatesAs(const RandomStates& states) : later_(states.now()) { states.restore(); }
  ~RandomStatesAs() { later_.restore(); }
  RandomStatesAs(const RandomStatesAs&) = delete;
  RandomStatesAs& operator=(const RandomStatesAs&) = delete;

 private:
  RandomStates later_;
};

/// Whether autocast is enabled for several device types, and its dtypes.
class AutocastStates {
 public:
  /// Of the CPU and of `inputs`' device types.
  static AutocastStates of_devices(at::TensorList inputs) {
    AutocastStates states;
    states.add(at::kCPU);
    for (const auto& input : inputs) {
      if (input.defined()) {
        states.add(input.device().type());
      }
    }
    return states;
  }

  /// The same device types' states now.
  AutocastStates now() const {
    AutocastStates states;
    for (const auto& entry : states_) {
      states.add(entry.device);
    }
    return states;
  }
  void restore() const {
    for (const auto& [device, enabled, dtype] : states_) {
      at::autocast::set_autocast_enabled(device, enabled);
      at::autocast::set_autocast_dtype(device, dtype);
    }
  }

 private:
  struct Entry {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };

  void add(at::DeviceType device) {
    const auto is_known = [device](const Entry& entry) { return entry.device == device; };
    if (std::none_of(states_.begin(), states_.end(), is_known)) {
      states_.push_back({device, at::autocast::is_autocast_enabled(device),
                         at::autocast::get_autocast_dtype(device)});
    }
  }

  std::vector<Entry> states_;
};

/// Backward runs on the engine's thread, which has a separate autocast state.
class AutocastAs {
 public:
  explicit AutocastAs(const AutocastStates& states) : before_(states.now()) {
    states.restore();
    at::autocast::increment_nesting();
  }
  ~AutocastAs() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    before_.restore();
  }
  AutocastAs(const AutocastAs&) = delete;
  AutocastAs& operator=(const AutocastAs&) = delete;

 private:
  AutocastStates before_;
};

thread_local bool recomputing = false;

class RecomputingAs {
 public:
  explicit RecomputingAs(bool value) : before_(std::exchange(recomputing, value)) {}
  ~RecomputingAs() { recomputing = before_; }
  RecomputingAs(const RecomputingAs&) = delete;
  RecomputingAs& operator=(const RecomputingAs&) = delete;

 private:
  bool before_;
};

/// The function and the state for its second run; the node saves the inputs.
struct SavedCall : torch::CustomClassHolder {
  Body body;
  RandomStates random;
  AutocastStates autocast;
};

class Checkpoint : public torch::autograd::Function<Checkpoint> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const Body& body,
                            at::TensorList inputs) {
    auto call = c10::make_intrusive<SavedCall>();
    call->body = body;
    call->random = RandomStates::of_devices(inputs);
    call->autocast = AutocastStates::of_devices(inputs);
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    ctx->save_for_backward(inputs.vec());
    // Inside a function that is recomputed, this result is read.
    const RecomputingAs first_run(false);
    return body(inputs.vec());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad_outputs) {
    detail::check_differentiated_once("checkpoint");
    // The backward inside writes .grad of all parameters that the function uses.
    TORCH_CHECK(
        torch::autograd::Engine::get_default_engine().is_checkpoint_valid(),
        "checkpoint: torch::autograd::grad() and backward() with `inputs` are not supported, "
        "because parameters inside would get a .grad; fix: call backward() without `inputs`, "
        "or run the function without checkpoint (model.checkpoint_every=0)");
    const auto capsule = ctx->saved_data["call"].toCapsule();
    auto& call = static_cast<SavedCall&>(*capsule);
    std::vector<at::Tensor> inputs;
    for (const auto& saved : ctx->get_saved_variables()) {
      inputs.push_back(saved.detach().requires_grad_(saved.requires_grad()));
    }
    at::Tensor output;
    {
      const RandomStatesAs random(call.random);
      const AutocastAs autocast(call.autocast);
      const at::AutoGradMode recording(true);
      const RecomputingAs second_run(true);
      output = call.body(inputs);
    }
    torch::autograd::backward({output}, {grad_outputs[0]});
    torch::autograd::variable_list gradients{at::Tensor()};  // for `body`
    for (const auto& input : inputs) {
      gradients.push_back(input.grad());
    }
    return gradients;
  }
};

}  // namespace

at::Tensor checkpoint(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function,
                      const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK(!inputs.empty(), "checkpoint: at least one input tensor is needed");
  if (!at::GradMode::is_enabled()) {
    const RecomputingAs first_run(false);
    return function(inputs);
  }
  return Checkpoint::apply(function, at::TensorList(inputs));
}

bool is_recomputing() {
  return recomputing;
}

}  // namespace ddp::ops
