// SPDX-License-Identifier: Apache-2.0
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <utility>

#include "core/log/trace_recorder.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "ddp/optim/sparse.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "optim/parameter_settings.hpp"
#include "optim/parameter_state.hpp"
#include "optim/state_check.hpp"
#include "optim/step_checks.hpp"
#include "reduce/reducer.hpp"

namespace ddp {
namespace {

struct RuleFacts {
  const char* name;
  std::vector<std::string> slots;  // each of the parameter's size
  double eps;                      // torch.optim's default
};

const RuleFacts& facts_of(SparseRule rule) {
  static const std::vector<RuleFacts> facts{{"sgd", {}, 0.0},
                                            {"adagrad", {"sum"}, 1e-10},
                                            {"sparse_adam", {"exp_avg", "exp_avg_sq"}, 1e-8}};
  return facts[static_cast<size_t>(rule)];
}

void require(bool holds, const char* setting, double value, const char* limit) {
  if (!holds) {
    throw SettingsError(
        concat("SparseOptimizerOptions::", setting, "=", value, " must be ", limit));
  }
}

void validate(const SparseOptimizerOptions& o) {
  const auto is_not_negative = [](double value) { return value >= 0.0 && std::isfinite(value); };
  const double eps = o.eps.value_or(0.0);
  require(is_not_negative(o.lr_decay), "lr_decay", o.lr_decay, "finite and 0 or more");
  require(is_not_negative(o.initial_accumulator_value), "initial_accumulator_value",
          o.initial_accumulator_value, "finite and 0 or more");
  require(o.beta1 >= 0.0 && o.beta1 < 1.0, "beta1", o.beta1, "at least 0 and below 1");
  require(o.beta2 >= 0.0 && o.beta2 < 1.0, "beta2", o.beta2, "at least 0 and below 1");
  require(is_not_negative(eps), "eps", eps, "finite and 0 or more");
}

/// The rows of one parameter that have a gradient.
struct Rows {
  at::Tensor indices;  // int64 [1, rows], ascending
  at::Tensor values;   // [rows, …]: the gradient

  at::Tensor of(const at::Tensor& whole) const {
    return at::index_select(whole, 0, indices.select(0, 0));
  }
  void add_to(const at::Tensor& whole, const at::Tensor& changes, double factor = 1.0) const {
    whole.add_(at::_sparse_coo_tensor_unsafe(indices, changes, whole.sizes(),
                                             whole.options().layout(at::kSparse),
                                             /*is_coalesced=*/true),
               factor);
  }
};

class SparseOptimizer final : public Optimizer {
 public:
  SparseOptimizer(const NamedParameters& parameters, const SparseOptimizerOptions& options)
      : options_(options), rule_(facts_of(options.rule)) {
    validate(options);
    for (const auto& settings : detail::settings_of_parameters(parameters, {})) {
      const auto& [name, leaf] = settings.parameter;
      if (detail::is_half(leaf.scalar_type()) || leaf.dim() == 0) {
        throw SettingsError(concat("make_sparse_optimizer: parameter ", name, " is ",
                                   leaf.scalar_type(), " of shape ", leaf.sizes(),
                                   "; allowed are float32 and float64 with rows; fix: keep the "
                                   "embedding in float32"));
      }
      parameters_.push_back(settings.parameter);
      members_.push_back({.memory = detail::memory_of(leaf), .slots = {}});
    }
    if (parameters_.empty()) {
      throw SettingsError(
          "make_sparse_optimizer: no parameter has sparse gradients; fix: set ddp.sparse=gather "
          "and make the embedding with sparse(true), or use make_optimizer");
    }
  }

  using Optimizer::step;
  void step(const StepScalars& scalars) override;
  const NamedParameters& named_parameters() const override { return parameters_; }
  bool supports_found_inf() const override { return false; }
  bool capturable() const override { return false; }
  std::string state_name() const override { return "sparse_optimizer"; }
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  struct Member {
    detail::ParameterMemory memory;  // when its state was made
    std::vector<at::Tensor> slots;   // in the order of RuleFacts; empty: no gradient so far
    int64_t num_steps = 0;
  };

  std::vector<at::Tensor> make_slots(const at::Tensor& leaf) const;
  void check(size_t index) const;
  std::map<StateKey, at::Tensor> tensors_of(size_t index, const Member& member) const;
  void update(Member& member, const at::Tensor& leaf, const Rows& rows, double lr) const;

  const SparseOptimizerOptions options_;
  const RuleFacts& rule_;
  NamedParameters parameters_;
  std::vector<Member> members_;  // by parameter
};

std::vector<at::Tensor> SparseOptimizer::make_slots(const at::Tensor& leaf) const {
  const double initial =
      options_.rule == SparseRule::Adagrad ? options_.initial_accumulator_value : 0.0;
  std::vector<at::Tensor> slots;
  for (size_t i = 0; i < rule_.slots.size(); ++i) {
    slots.push_back(at::full_like(leaf.detach(), initial));
  }
  return slots;
}

void SparseOptimizer::check(size_t index) const {
  const auto& [name, leaf] = parameters_[index];
  const at::Tensor& grad = leaf.grad();
  if (!grad.defined()) {
    return;
  }
  if (grad.layout() != at::kSparse || grad.sparse_dim() != 1) {
    throw SettingsError(concat("sparse optimizer: the gradient of ", name, " has layout ",
                               grad.layout(),
                               ", but this optimizer updates rows; fix: make the embedding with "
                               "sparse(true), or give the parameter to make_optimizer"));
  }
  const Member& member = members_[index];
  if (!member.slots.empty() &&
      (leaf.device() != member.memory.device || leaf.sizes() != member.slots[0].sizes())) {
    detail::refuse_replaced(name);
  }
}

void SparseOptimizer::step(const StepScalars& scalars) {
  const TraceScope trace("optimizer", "compute");
  require_means();
  const at::NoGradGuard no_grad;
  detail::require_lr(scalars);
  if (scalars.found_inf.defined() && detail::host_value(scalars.found_inf) != 0.0) {
    return;
  }
  const double lr = detail::host_value(scalars.lr);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    check(i);  // all before the first update
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& leaf = parameters_[i].tensor;
    if (!leaf.grad().defined()) {
      continue;
    }
    Member& member = members_[i];
    if (member.slots.empty()) {
      member.memory = detail::memory_of(leaf);
      member.slots = make_slots(leaf);
    }
    const at::Tensor grad = leaf.grad().coalesce();
    const auto factor = detail::factor_of(scalars, leaf.device(), leaf.scalar_type());
    const Rows rows{grad._indices(), factor ? at::mul(grad._values(), *factor) : grad._values()};
    ++member.num_steps;
    if (rows.values.numel() > 0) {
      update(member, leaf, rows, lr);
    }
  }
}

// The order of operations is that of torch.optim.
void SparseOptimizer::update(Member& member, const at::Tensor& leaf, const Rows& rows,
                             double lr) const {
  const auto num_steps = static_cast<double>(member.num_steps);
  const double eps = options_.eps.value_or(rule_.eps);
  switch (options_.rule) {
    case SparseRule::Sgd:
      rows.add_to(leaf, rows.values, -lr);
      return;
    case SparseRule::Adagrad: {
      rows.add_to(member.slots[0], rows.values.pow(2));
      const at::Tensor deviation = rows.of(member.slots[0]).sqrt_().add_(eps);
      rows.add_to(leaf, rows.values / deviation, -lr / (1 + (num_steps - 1) * options_.lr_decay));
      return;
    }
    case SparseRule::SparseAdam: {
      const at::Tensor mean = rows.of(member.slots[0]);
      const at::Tensor square = rows.of(member.slots[1]);
      const at::Tensor mean_change = rows.values.sub(mean).mul_(1 - options_.beta1);
      const at::Tensor square_change = rows.values.pow(2).sub_(square).mul_(1 - options_.beta2);
      rows.add_to(member.slots[0], mean_change);
      rows.add_to(member.slots[1], square_change);
      const at::Tensor deviation = square_change.add(square).sqrt_().add_(eps);
      const double step_size = lr * std::sqrt(1 - std::pow(options_.beta2, num_steps)) /
                               (1 - std::pow(options_.beta1, num_steps));
      rows.add_to(leaf, mean_change.add(mean).div_(deviation).mul_(-step_size));
      return;
    }
  }
}

std::map<StateKey, at::Tensor> SparseOptimizer::tensors_of(size_t index,
                                                           const Member& member) const {
  std::map<StateKey, at::Tensor> tensors;
  for (size_t i = 0; i < rule_.slots.size(); ++i) {
    tensors[StateKey(parameters_[index].name, rule_.slots[i])] = member.slots[i];
  }
  if (!rule_.slots.empty()) {
    tensors[StateKey(parameters_[index].name, "step")] =
        at::scalar_tensor(member.num_steps, at::kLong);
  }
  return tensors;
}

StateDict SparseOptimizer::state_dict() const {
  StateDict state;
  state.values["type"] = std::string(rule_.name);
  for (size_t i = 0; i < members_.size(); ++i) {
    if (!members_[i].slots.empty()) {
      state.tensors.merge(tensors_of(i, members_[i]));
    }
  }
  return state;
}

void SparseOptimizer::load_state_dict(const StateDict& state) {
  const at::NoGradGuard no_grad;
  detail::StateCheck check(state, state_name());
  check.value("type", StateValue(std::string(rule_.name)));
  std::vector<Member> loaded;  // unused until every key is checked
  for (size_t i = 0; i < members_.size(); ++i) {
    const at::Tensor& leaf = parameters_[i].tensor;
    Member member{.memory = detail::memory_of(leaf), .slots = make_slots(leaf)};
    const auto tensors = tensors_of(i, member);
    if (check.all_or_none(tensors)) {
      for (const auto& [key, tensor] : tensors) {
        tensor.copy_(state.whole(key));
      }
      member.num_steps = tensors.at(StateKey(parameters_[i].name, "step")).item<int64_t>();
    } else {
      member.slots.clear();
    }
    loaded.push_back(std::move(member));
  }
  check.nothing_else();
  members_ = std::move(loaded);
}

NamedParameters parameters_by_kind(const DataParallelModel& model, bool is_sparse) {
  NamedParameters chosen;
  const auto& gradients = model.reducer().gradients();
  for (size_t i = 0; i < gradients.parameters().size(); ++i) {
    if (gradients.specs()[i].is_sparse == is_sparse) {
      chosen.push_back(gradients.parameters()[i]);
    }
  }
  return chosen;
}

}  // namespace

void describe_fields(SparseOptimizerOptions& o, FieldVisitor& v) {
  v.field({.name = "rule", .doc = "Update rule of rows, as in torch.optim."}, o.rule,
          {{facts_of(SparseRule::Sgd).name, SparseRule::Sgd},
           {facts_of(SparseRule::Adagrad).name, SparseRule::Adagrad},
           {facts_of(SparseRule::SparseAdam).name, SparseRule::SparseAdam}});
  v.field({.name = "lr_decay", .doc = "adagrad: decay of the learning rate.", .min = 0.0},
          o.lr_decay);
  v.field(
      {.name = "initial_accumulator_value", .doc = "adagrad: initial sum of squares.", .min = 0.0},
      o.initial_accumulator_value);
  v.field({.name = "beta1", .doc = "sparse_adam: decay of the mean.", .min = 0.0, .max = 1.0},
          o.beta1);
  v.field(
      {.name = "beta2", .doc = "sparse_adam: decay of the mean square.", .min = 0.0, .max = 1.0},
      o.beta2);
  v.field({.name = "eps",
           .doc = "Added to the denominator. auto: 1e-10 for adagrad, 1e-8 for sparse_adam.",
           .min = 0.0},
          o.eps);
}

NamedParameters sparse_parameters(const DataParallelModel& model) {
  return parameters_by_kind(model, true);
}

NamedParameters dense_parameters(const DataParallelModel& model) {
  return parameters_by_kind(model, false);
}

std::unique_ptr<Optimizer> make_sparse_optimizer(const NamedParameters& parameters,
                                                 const SparseOptimizerOptions& options) {
  return std::make_unique<SparseOptimizer>(parameters, options);
}

std::unique_ptr<Optimizer> make_sparse_optimizer(const DataParallelModel& model,
                                                 const SparseOptimizerOptions& options) {
  return make_sparse_optimizer(sparse_parameters(model), options);
}

}  // namespace ddp
