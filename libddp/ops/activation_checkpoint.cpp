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
#include "ops/shared/flop_counter.hpp"
#include "ops/shared/random_states.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::ops {
namespace {

using detail::DeviceStates;
using detail::RandomStates;
using detail::RandomStatesAs;

using Body = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Whether autocast is enabled for a device's type, and its dtype.
class AutocastState {
 public:
  explicit AutocastState(at::Device device)
      : device_(device),
        enabled_(at::autocast::is_autocast_enabled(device.type())),
        dtype_(at::autocast::get_autocast_dtype(device.type())) {}
  at::Device device() const { return device_; }
  void restore() const {
    at::autocast::set_autocast_enabled(device_.type(), enabled_);
    at::autocast::set_autocast_dtype(device_.type(), dtype_);
  }

 private:
  at::Device device_;
  bool enabled_;
  at::ScalarType dtype_;
};
using AutocastStates = DeviceStates<AutocastState>;

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
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const Body& body, bool has_one_result,
                                                at::TensorList inputs) {
    auto call = c10::make_intrusive<SavedCall>();
    call->body = body;
    call->random = RandomStates::of_devices(inputs);
    call->autocast = AutocastStates::of_devices(inputs);
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    // As in PyTorch, a lone result without a gradient has a gradient of zeros. Results beside
    // others, which a loss may not use, have none.
    ctx->set_materialize_grads(has_one_result);
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
        "or run the function without checkpoint (model.checkpoint_every=0, or no "
        "model.checkpoint_blocks)");
    const auto capsule = ctx->saved_data["call"].toCapsule();
    auto& call = static_cast<SavedCall&>(*capsule);
    std::vector<at::Tensor> inputs;
    for (const auto& saved : ctx->get_saved_variables()) {
      inputs.push_back(saved.detach().requires_grad_(saved.requires_grad()));
    }
    std::vector<at::Tensor> outputs;
    {
      const RandomStatesAs random(call.random);
      const AutocastAs autocast(call.autocast);
      const at::AutoGradMode recording(true);
      const RecomputingAs second_run(true);
      const detail::UncountedOps uncounted;
      outputs = call.body(inputs);
    }
    std::vector<at::Tensor> roots, root_gradients;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (grad_outputs[i].defined() && outputs[i].requires_grad()) {
        roots.push_back(outputs[i]);
        root_gradients.push_back(grad_outputs[i]);
      }
    }
    torch::autograd::backward(roots, root_gradients);
    torch::autograd::variable_list gradients(2);  // for `body` and `has_one_result`
    for (const auto& input : inputs) {
      gradients.push_back(input.grad());
    }
    return gradients;
  }
};

std::vector<at::Tensor> run(const Body& body, bool has_one_result,
                            const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK(!inputs.empty(), "checkpoint: at least one input tensor is needed");
  if (!at::GradMode::is_enabled()) {
    const RecomputingAs first_run(false);
    return body(inputs);
  }
  return Checkpoint::apply(body, has_one_result, at::TensorList(inputs));
}

}  // namespace

std::vector<at::Tensor> checkpoint(const Body& function, const std::vector<at::Tensor>& inputs) {
  return run(function, /*has_one_result=*/false, inputs);
}

at::Tensor checkpoint(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function,
                      const std::vector<at::Tensor>& inputs) {
  const Body body = [function](const std::vector<at::Tensor>& given) {
    return std::vector<at::Tensor>{function(given)};
  };
  return run(body, /*has_one_result=*/true, inputs)[0];
}

bool is_recomputing() {
  return recomputing;
}

}  // namespace ddp::ops
