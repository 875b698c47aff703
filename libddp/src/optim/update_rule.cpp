// SPDX-License-Identifier: Apache-2.0
#include "optim/update_rule.hpp"

#include <ATen/Functions.h>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// Calls `kernel` with the learning rate as a double, or as a tensor where only the device knows it.
// Rounded to float32 in both cases, so that eager and captured steps give the same bits.
template <typename Kernel>
void with_lr(const UpdateBatch& batch, const StepScalar& lr, Kernel kernel) {
  const auto lr_scale = static_cast<float>(batch.lr_scale);
  if (lr.value()) {
    kernel(static_cast<double>(static_cast<float>(*lr.value()) * lr_scale));
    return;
  }
  const at::Tensor tensor = lr.tensor(batch.params.front().device());
  kernel(lr_scale == 1.0F ? tensor : at::mul(tensor, at::Scalar(lr_scale)));
}

class SgdRule final : public UpdateRule {
 public:
  explicit SgdRule(const OptimizerOptions& options)
      : momentum_(options.momentum), dampening_(options.dampening), nesterov_(options.nesterov) {}

  std::string type() const override { return "sgd"; }
  std::vector<std::string> slots() const override {
    return momentum_ == 0.0 ? std::vector<std::string>{}
                            : std::vector<std::string>{"momentum_buffer"};
  }
  bool counts_steps() const override { return false; }
  bool first_update_differs() const override { return momentum_ != 0.0 && dampening_ != 0.0; }

  void update(const UpdateBatch& batch, const StepScalar& lr) const override {
    // PyTorch's first momentum is the gradient itself. Zeros and the usual formula give the same
    // bits where dampening is 0, and stay right where found_inf makes the device skip the first
    // step.
    const bool is_first_step = batch.first && first_update_differs();
    const at::TensorList buffers =
        momentum_ == 0.0 ? at::TensorList{} : at::TensorList(batch.slots.front());
    with_lr(batch, lr, [&](const auto& rate) {
      at::_fused_sgd_(batch.params, batch.grads, buffers, batch.weight_decay, momentum_, rate,
                      dampening_, nesterov_, /*maximize=*/false, is_first_step, batch.grad_scale,
                      batch.found_inf);
    });
  }

 private:
  double momentum_;
  double dampening_;
  bool nesterov_;
};

class AdamRule final : public UpdateRule {
 public:
  explicit AdamRule(const OptimizerOptions& options)
      : decoupled_(options.type == OptimizerType::AdamW),
        beta1_(options.beta1),
        beta2_(options.beta2),
        eps_(options.eps),
        amsgrad_(options.amsgrad) {}

  std::string type() const override { return decoupled_ ? "adamw" : "adam"; }
  std::vector<std::string> slots() const override {
    std::vector<std::string> names{"exp_avg", "exp_avg_sq"};
    if (amsgrad_) {
      names.emplace_back("max_exp_avg_sq");
    }
    return names;
  }
  bool counts_steps() const override { return true; }

  void update(const UpdateBatch& batch, const StepScalar& lr) const override {
    const at::TensorList max_exp_avg_sqs =
        amsgrad_ ? at::TensorList(batch.slots[2]) : at::TensorList{};
    with_lr(batch, lr, [&](const auto& rate) {
      const auto kernel = [&](auto fused) {
        fused(batch.params, batch.grads, batch.slots[0], batch.slots[1], max_exp_avg_sqs,
              batch.steps, rate, beta1_, beta2_, batch.weight_decay, eps_, amsgrad_,
              /*maximize=*/false, batch.grad_scale, batch.found_inf);
      };
      if (decoupled_) {
        kernel([](auto&&... args) { at::_fused_adamw_(args...); });
      } else {
        kernel([](auto&&... args) { at::_fused_adam_(args...); });
      }
    });
  }

 private:
  bool decoupled_;
  double beta1_;
  double beta2_;
  double eps_;
  bool amsgrad_;
};

}  // namespace

std::unique_ptr<UpdateRule> make_update_rule(const OptimizerOptions& options) {
  if (options.type == OptimizerType::Sgd) {
    return std::make_unique<SgdRule>(options);
  }
  return std::make_unique<AdamRule>(options);
}

}  // namespace ddp::detail
