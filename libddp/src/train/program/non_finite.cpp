// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/non_finite.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <deque>
#include <utility>
#include <vector>

namespace ddp {
namespace {

// Steps that the host may be ahead of its last check on a GPU. Equal on all ranks, which then throw
// after the same step. Less than the number of steps whose numbers are readable.
constexpr size_t kStepsUncheckedOnGpu = 32;

constexpr const char* kNonFiniteFix =
    "; fix: a lower lr_schedule.lr, train.max_grad_norm, or train.non_finite=skip";

std::string text_of(double loss) {
  return std::isnan(loss) ? "nan" : loss > 0 ? "inf" : "-inf";
}

}  // namespace

std::string first_non_finite(const NamedParameters& parameters) {
  if (parameters.empty()) {
    return "";
  }
  const at::NoGradGuard no_grad;
  const at::Device device = parameters.front().tensor.device();
  std::vector<at::Tensor> finite;
  for (const NamedParameter& parameter : parameters) {
    finite.push_back(at::isfinite(parameter.tensor.detach()).all().to(device));
  }
  const at::Tensor host = at::stack(finite).cpu();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!host.const_data_ptr<bool>()[i]) {
      return parameters[i].name;
    }
  }
  return "";
}

class NonFiniteGuard::Checks {
 public:
  Checks(const Context& context, NonFinite action, const Optimizer& optimizer,
         const GradScaler& scaler)
      : context_(context), action_(action), optimizer_(optimizer), scaler_(scaler) {}

  bool skips() const { return action_ == NonFinite::Skip; }
  int64_t bad_in_a_row() const { return bad_in_a_row_; }
  void end_step(int64_t step, const Logged& logged) {
    if (action_ == NonFinite::Ignore) {
      return;
    }
    steps_.emplace_back(step, logged);
    check_all_but(context_.device().is_cuda() ? kStepsUncheckedOnGpu : 0);
  }
  void check_all_but(size_t num_latest);
  void check_weights() const;

 private:
  void check(int64_t step, const Logged& logged);
  [[noreturn]] void throw_error(int64_t step, double loss, int64_t parameter) const;

  const Context& context_;
  const NonFinite action_;
  const Optimizer& optimizer_;
  const GradScaler& scaler_;
  std::deque<std::pair<int64_t, Logged>> steps_;  // not checked yet
  int64_t bad_in_a_row_ = 0;                      // up to the last checked step
};

void NonFiniteGuard::Checks::check_all_but(size_t num_latest) {
  while (steps_.size() > num_latest) {
    const auto [step, logged] = std::move(steps_.front());
    steps_.pop_front();
    check(step, logged);
  }
}

void NonFiniteGuard::Checks::check(int64_t step, const Logged& logged) {
  const double loss = logged.loss.value();
  const bool has_scan = logged.first_non_finite.has_value() && !scaler_.is_enabled();
  const auto parameter = has_scan ? static_cast<int64_t>(logged.first_non_finite.value()) : -1;
  const bool bad = parameter >= 0 || !std::isfinite(loss);
  bad_in_a_row_ = bad ? bad_in_a_row_ + 1 : 0;
  if (bad && action_ == NonFinite::Error) {
    throw_error(step, loss, parameter);
  }
}

// Reduced gradients are equal on all ranks, so all ranks call this and exchange their losses. A
// rank's loss is known only to itself.
void NonFiniteGuard::Checks::throw_error(int64_t step, double loss, int64_t parameter) const {
  const auto begin = concat("step ", step + 1, " is not finite (train.non_finite=error): ");
  if (parameter < 0) {
    const std::string weight = first_non_finite(optimizer_.named_parameters());
    throw NonFiniteError(
        concat(begin, "the loss of rank ", context_.rank(), " is ", text_of(loss), "; ",
               weight.empty() ? "all weights are finite"
                              : "the first weight with inf or NaN behind it is " + weight,
               kNonFiniteFix));
  }
  const std::string own = std::isfinite(loss)
                              ? ""
                              : concat("the loss of rank ", context_.rank(), " is ", text_of(loss));
  std::string first;
  for (const std::string& loss_of_rank : context_.control_plane().all_gather(own)) {
    first = first.empty() ? loss_of_rank : first;
  }
  throw NonFiniteError(
      concat(begin, "the first gradient with inf or NaN is that of ",
             optimizer_.named_parameters().at(static_cast<size_t>(parameter)).name, "; ",
             first.empty() ? concat("the losses of all ", context_.world_size(),
                                    " ranks are finite (reported by rank ", context_.rank(), ")")
                           : first,
             kNonFiniteFix));
}

void NonFiniteGuard::Checks::check_weights() const {
  if (action_ != NonFinite::Error) {
    return;
  }
  const std::string weight = first_non_finite(optimizer_.named_parameters());
  if (!weight.empty()) {
    throw NonFiniteError(concat(
        "the weights are not finite after the last step (train.non_finite=error): the first with "
        "inf or NaN is ",
        weight, ", on rank ", context_.rank(), kNonFiniteFix));
  }
}

NonFiniteGuard::NonFiniteGuard(const Context& context, NonFinite action, const Optimizer& optimizer,
                               const GradScaler& scaler)
    : checks_(std::make_unique<Checks>(context, action, optimizer, scaler)) {}
NonFiniteGuard::~NonFiniteGuard() = default;

bool NonFiniteGuard::skips() const {
  return checks_->skips();
}

at::Tensor NonFiniteGuard::watch(const at::Tensor& loss) const {
  // Multiplies by 1 if the loss is finite, else by NaN: inf * 0 is NaN.
  return skips() ? loss * (loss.detach() * 0.0 + 1.0) : loss;
}

void NonFiniteGuard::end_step(int64_t step, const Logged& logged) {
  checks_->end_step(step, logged);
}

void NonFiniteGuard::check_steps() {
  checks_->check_all_but(0);
}

std::string NonFiniteGuard::before_save() {
  check_steps();
  const int64_t skipped = skips() ? checks_->bad_in_a_row() : 0;
  return skipped > 1 ? concat("the last ", skipped, " updates were skipped (train.non_finite=skip)")
                     : "";
}

void NonFiniteGuard::check_weights() const {
  checks_->check_weights();
}

}  // namespace ddp
