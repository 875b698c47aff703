// SPDX-License-Identifier: Apache-2.0
#include "optim/update_rule.hpp"

#include <ATen/Functions.h>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// Calls `kernel` with the learning rate as a double, or as a tensor if only the device knows it.
// Both are rounded to float32, so that eager and captured steps give the same bits. For float64
// weights that rounding would be their largest error, so their eager steps use the unrounded rate.
template <typename Kernel>
void with_lr(const UpdateBatch& batch, const StepScalar& lr, Kernel kernel) {
  const auto lr_scale = static_cast<float>(batch.lr_scale);
  const at::Tensor& first = batch.params.front();
  if (lr.value() && first.scalar_type() == at::kDouble) {
    kernel(*lr.value() * batch.lr_scale);
    return;
  }
  if (lr.value()) {
    kernel(static_cast<double>(static_cast<float>(*lr.value()) * lr_scale));
    return;
  }
  const at::Tensor tensor = lr.tensor(first.device()).to(at::kFloat);
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
    // bits if dampening is 0, and stay correct if found_inf skips the first step on the device.
    const bool is_first_step = batch.first && first_update_differs();
    const at::TensorList buffers =
        momentum_ == 0.0 ? at::TensorList{} : at::TensorList(batch.slots.front());
    with_lr(batch, lr, [&](const auto& rate) {
      at::_fused_sgd_(batch.params, batch.grads, buffers, batch.weight_decay, momentum_, rate,
                      dampening_, nesterov_, /*maximize=*/false, is_first_step,
                      /*grad_scale=*/std::nullopt, batch.found_inf);
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
              /*maximize=*/false, /*grad_scale=*/std::nullopt, batch.found_inf);
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

// Leaves `tensor` unchanged if found_inf is set, which only the device may know.
void assign(const UpdateBatch& batch, const at::Tensor& tensor, const at::Tensor& value) {
  tensor.copy_(batch.found_inf ? at::where(at::ne(*batch.found_inf, 0.0), tensor, value) : value);
}

// In float64: float32 overflows for squares of numbers above 1.8e19.
at::Tensor norm_of(const at::Tensor& tensor) {
  return at::linalg_vector_norm(tensor, 2, std::nullopt, /*keepdim=*/false, at::kDouble)
      .to(tensor.scalar_type());
}

// `ratio` if both norms are more than 0, else 1.
at::Tensor trust_ratio(const at::Tensor& ratio, const at::Tensor& a, const at::Tensor& b) {
  return at::where(at::logical_and(at::gt(a, 0.0), at::gt(b, 0.0)), ratio, at::ones_like(ratio));
}

// `moved`, or 0 where the rate is 0: a momentum of earlier rates moves no weight then.
at::Tensor unless_zero(double rate, const at::Tensor& moved) {
  return rate == 0.0 ? at::zeros_like(moved) : moved;
}
at::Tensor unless_zero(const at::Tensor& rate, const at::Tensor& moved) {
  return at::where(at::eq(rate, 0.0), at::zeros_like(moved), moved);
}

// One parameter at a time, in elementary operations: the reference for the flat optimizer.
class LarsRule final : public UpdateRule {
 public:
  explicit LarsRule(const OptimizerOptions& options)
      : momentum_(options.momentum),
        trust_coefficient_(options.trust_coefficient),
        eps_(options.eps) {}

  std::string type() const override { return "lars"; }
  std::vector<std::string> slots() const override { return {"momentum_buffer"}; }
  bool counts_steps() const override { return false; }

  void update(const UpdateBatch& batch, const StepScalar& lr) const override {
    for (size_t i = 0; i < batch.params.size(); ++i) {
      const at::Tensor& weight = batch.params[i];
      const at::Tensor& gradient = batch.grads[i];
      at::Tensor update = gradient + batch.weight_decay * weight;
      if (batch.adapts) {
        const at::Tensor w = norm_of(weight);
        const at::Tensor g = norm_of(gradient);
        update = update *
                 trust_ratio(trust_coefficient_ * w / (g + batch.weight_decay * w + eps_), w, g);
      }
      const at::Tensor& slot = batch.slots[0][i];
      with_lr(batch, lr, [&](const auto& rate) {
        const at::Tensor moved = momentum_ * slot + rate * update;
        assign(batch, weight, weight - unless_zero(rate, moved));
        assign(batch, slot, moved);
      });
    }
  }

 private:
  double momentum_;
  double trust_coefficient_;
  double eps_;
};

class LambRule final : public UpdateRule {
 public:
  explicit LambRule(const OptimizerOptions& options)
      : beta1_(options.beta1), beta2_(options.beta2), eps_(options.eps) {}

  std::string type() const override { return "lamb"; }
  std::vector<std::string> slots() const override { return {"exp_avg", "exp_avg_sq"}; }
  bool counts_steps() const override { return true; }

  void update(const UpdateBatch& batch, const StepScalar& lr) const override {
    for (size_t i = 0; i < batch.params.size(); ++i) {
      const at::Tensor& weight = batch.params[i];
      const at::Tensor& gradient = batch.grads[i];
      const at::Tensor mean = beta1_ * batch.slots[0][i] + (1.0 - beta1_) * gradient;
      const at::Tensor square = beta2_ * batch.slots[1][i] + (1.0 - beta2_) * gradient * gradient;
      const at::Tensor count = batch.steps[i].to(at::kDouble);
      const auto correction = [&](double beta) {
        return at::rsub(at::pow(at::Scalar(beta), count), 1.0).to(weight.scalar_type());
      };
      at::Tensor update =
          mean / correction(beta1_) / (at::sqrt(square / correction(beta2_)) + eps_) +
          batch.weight_decay * weight;
      if (batch.adapts) {
        const at::Tensor w = norm_of(weight);
        const at::Tensor u = norm_of(update);
        update = update * trust_ratio(w / u, w, u);
      }
      with_lr(batch, lr, [&](const auto& rate) { assign(batch, weight, weight - rate * update); });
      assign(batch, batch.slots[0][i], mean);
      assign(batch, batch.slots[1][i], square);
    }
  }

 private:
  double beta1_;
  double beta2_;
  double eps_;
};

}  // namespace

std::unique_ptr<UpdateRule> make_update_rule(const OptimizerOptions& options) {
  switch (options.type) {
    case OptimizerType::Sgd:
      return std::make_unique<SgdRule>(options);
    case OptimizerType::Lars:
      return std::make_unique<LarsRule>(options);
    case OptimizerType::Lamb:
      return std::make_unique<LambRule>(options);
    default:
      return std::make_unique<AdamRule>(options);
  }
}

}  // namespace ddp::detail
