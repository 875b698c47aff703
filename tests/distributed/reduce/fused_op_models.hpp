// SPDX-License-Identifier: Apache-2.0
// Models of one fused op each, wrapped in every way that shares parameters, beside plain twins.
#pragma once

#include <cctype>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/ops/language.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "support/fused_ops.hpp"

namespace ddp::test {

inline torch::Tensor random_values(std::vector<int64_t> shape, int64_t seed) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  return torch::randn(shape, generator).to(context().device());
}

/// The loss of one op, times a parameter of the model's own.
struct OpModelImpl : torch::nn::Module {
  OpModelImpl(const FusedOp& of, bool is_fused, const std::vector<torch::Tensor>& shared)
      : op(of), fused(is_fused), parts(shared) {
    for (size_t i = 0; i < parts.size(); ++i) {
      register_parameter("p" + std::to_string(i), parts[i], parts[i].requires_grad());
    }
    scale = register_parameter("scale", torch::full({1}, 0.75, on_device()));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto& call = fused ? op.fused : op.plain;
    const auto y = recomputed && fused
                       ? ops::checkpoint([&](const auto& in) { return call(in[0], parts); }, {x})
                       : call(x, parts);
    const auto wide = y.to(torch::kFloat);
    return (y.numel() == 1 ? wide : wide.square().mean()) * scale.sum();
  }
  const FusedOp& op;
  bool fused, recomputed = false;
  std::vector<torch::Tensor> parts;
  torch::Tensor scale;
};
TORCH_MODULE(OpModel);

/// Two models over the same parameters of an op. With `is_one` both are one module.
struct OpPair {
  OpPair(const FusedOp& op, bool fused, bool is_one) {
    for (const auto& shape : op.parameters) {
      const auto seed = static_cast<int64_t>(shared.size()) + 5;
      auto value = random_values(shape, seed) * 0.3 + (shape.size() == 1 ? 0.5 : 0.0);
      shared.push_back(value.requires_grad_());
    }
    a = OpModel(op, fused, shared);
    b = is_one ? a : OpModel(op, fused, shared);
  }
  std::vector<torch::Tensor> parameters() const {
    auto all = shared;
    all.push_back(a->scale);
    all.push_back(b->scale);
    return all;
  }
  void zero_grad() const {
    for (const auto& parameter : parameters()) {
      parameter.mutable_grad() = torch::Tensor();
    }
  }
  void set_recomputed() { a->recomputed = b->recomputed = true; }

  std::vector<torch::Tensor> shared;
  OpModel a{nullptr}, b{nullptr};
};

using OpWrapper = DistributedDataParallel<OpModel>;

/// The op's input on rank `r`; half precision on a GPU, where the kernels need it.
inline torch::Tensor op_input(const FusedOp& op, int r, int64_t step) {
  const auto x = random_values(op.input, 1000 * (step + 1) + r);
  return (x.is_cuda() ? x.to(torch::kBFloat16) : x).requires_grad_();
}

/// The mean over all ranks of a plain model's loss.
inline torch::Tensor mean_loss(OpModel& plain, int64_t step) {
  auto sum = torch::zeros({}, on_device());
  for (int r = 0; r < world(); ++r) {
    sum = sum + plain->forward(op_input(plain->op, r, step));
  }
  return sum / world();
}

/// Runs `events`: "a" and "b" are the models' forwards, "A" and "B" their backwards, "+" one
/// backward of all losses. `forward(model, step)` returns the loss. Calls `at_backward` before the
/// first backward.
template <typename Forward>
void run_events(
    const std::string& events, int64_t step, const Forward& forward,
    const std::function<void()>& at_backward = [] {}) {
  torch::Tensor loss[2];
  bool has_begun = false;
  for (const char event : events) {
    if (std::islower(static_cast<unsigned char>(event)) != 0) {
      loss[event - 'a'] = forward(event, step + event);
      continue;
    }
    if (!std::exchange(has_begun, true)) {
      at_backward();
    }
    if (event == '+') {
      (loss[0] + loss[1]).backward();
    } else {
      loss[event - 'A'].backward();
    }
  }
}

/// Gradients that plain LibTorch computes, against the wrappers' ones, after the same events.
class OpRuns {
 public:
  OpRuns(const FusedOp& op, bool is_one) : ours(op, true, is_one), plain(op, false, is_one) {}

  void wrap(bool both) {
    model_a = std::make_unique<OpWrapper>(ours.a, group());
    if (both) {
      model_b = std::make_unique<OpWrapper>(ours.b, group());
    }
  }
  void set_trained(const std::vector<bool>& trained) const {
    for (const auto* pair : {&ours, &plain}) {
      for (size_t i = 0; i < trained.size(); ++i) {
        pair->shared[i].set_requires_grad(trained[i]);
      }
    }
  }
  void zero_grad() const {
    ours.zero_grad();
    plain.zero_grad();
  }
  void run(
      const std::string& events, int64_t step, const std::function<void()>& at_backward = [] {}) {
    run_events(
        events, step,
        [&](char which, int64_t s) { return wrapper(which).forward(op_input(op(), rank(), s)); },
        at_backward);
    run_plain(events, step, at_backward);
  }
  /// The same under no_sync() of both wrappers.
  void run_locally(const std::string& events, int64_t step) {
    {
      std::optional<NoSync> a, b;
      a.emplace(*model_a);
      if (model_b != nullptr) {
        b.emplace(*model_b);
      }
      run_events(events, step, [&](char which, int64_t s) {
        return wrapper(which).forward(op_input(op(), rank(), s));
      });
    }
    run_plain(events, step, [] {});
  }
  void check() const {
    const auto got = ours.parameters(), wanted = plain.parameters();
    for (size_t i = 0; i < got.size(); ++i) {
      INFO("parameter " << i);
      REQUIRE(got[i].grad().defined() == wanted[i].grad().defined());
      if (got[i].grad().defined()) {
        require_close(got[i].grad(), wanted[i].grad());
      }
    }
  }
  /// bf16 on a GPU; on a CPU only sums in another order differ.
  static void require_close(const torch::Tensor& got, const torch::Tensor& wanted) {
    const double bound = context().device().is_cpu() ? 1e-4 : 0.05;
    const double norm = wanted.norm().item<double>();
    INFO("norm " << got.norm().item<double>() << " for " << norm);
    REQUIRE((got - wanted).norm().item<double>() <= bound * norm + 1e-6);
  }

  const FusedOp& op() const { return ours.a->op; }
  OpWrapper& wrapper(char which) { return which == 'a' ? *model_a : *model_b; }

  OpPair ours, plain;
  std::unique_ptr<OpWrapper> model_a, model_b;

 private:
  void run_plain(const std::string& events, int64_t step,
                 const std::function<void()>& at_backward) {
    run_events(
        events, step,
        [&](char which, int64_t s) { return mean_loss(which == 'a' ? plain.a : plain.b, s); },
        at_backward);
  }
};

/// Each parameter alone frozen, and each alone trained.
inline std::vector<std::vector<bool>> choices_of_trained(const FusedOp& op) {
  const size_t count = op.parameters.size();
  std::vector<std::vector<bool>> choices;
  for (size_t i = 0; i < count; ++i) {
    auto& without = choices.emplace_back(count, true);
    without[i] = false;
    if (count > 1) {
      auto& alone = choices.emplace_back(count, false);
      alone[i] = true;
    }
  }
  return choices;
}

}  // namespace ddp::test
