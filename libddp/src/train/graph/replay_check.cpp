// SPDX-License-Identifier: Apache-2.0
#include "train/graph/replay_check.hpp"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ops/shared/flop_counter.hpp"
#include "ops/shared/random_states.hpp"
#include "reduce/model/model_parts.hpp"
#include "reduce/sparse_gradients.hpp"

namespace ddp::detail {
namespace {

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.clone());
  }
  return copies;
}

void copy_back(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
}

std::vector<at::Tensor> gradients_of(const DataParallelModel& model) {
  std::vector<at::Tensor> gradients;
  for (const auto& entry : model.named_parameters()) {
    if (entry.tensor.grad().defined()) {
      gradients.push_back(entry.tensor.grad());
    }
  }
  return gradients;
}

std::vector<at::Tensor> buffers_of(const DataParallelModel& model) {
  std::vector<at::Tensor> buffers;
  for (const auto& entry : model.named_buffers()) {
    buffers.push_back(entry.tensor);
  }
  return buffers;
}

// Whether the next forward begins with rank 0's buffers, which change what it computes.
bool awaits_buffers(const DataParallelModel& model) {
  const auto state = deciding_buffer_state(model);
  return state && state->is_required && !state->is_sent;
}

}  // namespace

/// What forward and backward change besides weights.
struct ReplayCheck::Saved {
  struct Model {
    DataParallelModel* model;
    Reducer::State state;
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> gradient_values;
    std::vector<at::Tensor> buffer_values;
  };
  using Generator = std::pair<at::Generator, at::Tensor>;  // and its state

  Saved(const GraphedParts& parts, at::Device device)
      : random(ops::detail::RandomStates::of_devices(
            {at::empty({0}, at::TensorOptions().device(device))})) {
    for (auto* model : parts.models) {
      auto gradients = gradients_of(*model);
      auto values = copies_of(gradients);
      models.push_back({model, model->reducer().state(), std::move(gradients), std::move(values),
                        copies_of(buffers_of(*model))});
    }
    for (at::Generator generator : parts.generators) {
      const std::lock_guard lock(generator.mutex());
      generators.emplace_back(generator, generator.get_state());
    }
  }

  void restore() {
    for (const Model& saved : models) {
      saved.model->reducer().restore(saved.state);
      copy_back(saved.gradients, saved.gradient_values);
      copy_back(buffers_of(*saved.model), saved.buffer_values);
    }
    random.restore();
    for (auto& [generator, state] : generators) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

  std::vector<Model> models = {};
  ops::detail::RandomStates random;
  std::vector<Generator> generators = {};
};

ReplayCheck::ReplayCheck(Context& context, const GraphedParts& parts,
                         const GraphedStepOptions& options)
    : context_(context), parts_(parts), every_(options.replay_check_every), name_(options.name) {
  for (auto* model : parts_.models) {
    const auto& gradients = model->reducer().gradients();
    if (!sparse_indices(gradients).empty()) {
      throw SettingsError(
          "train.replay_check_every does not support ddp.sparse=gather, whose rows are in no "
          "bucket; "
          "fix: set train.replay_check_every=0, or sparse(false) in the embeddings");
    }
    const size_t max_buckets = gradients.parameters().size();
    for (const bool is_rehearsal : {true, false}) {
      (is_rehearsal ? rehearsed_ : real_)
          .push_back(std::make_unique<GradientProbe>(is_rehearsal, max_buckets, context.device()));
    }
  }
}

ReplayCheck::~ReplayCheck() = default;

ReplayCheck::Recording::Recording(const ReplayCheck& check, bool is_rehearsal) : check_(check) {
  for (size_t i = 0; i < check_.parts_.models.size(); ++i) {
    check_.parts_.models[i]->reducer().gradients().probe() = check_.probes(is_rehearsal)[i].get();
  }
}

ReplayCheck::Recording::~Recording() {
  for (auto* model : check_.parts_.models) {
    model->reducer().gradients().probe() = nullptr;
  }
}

std::unique_ptr<ReplayCheck> make_replay_check(Context& context, const GraphedParts& parts,
                                               const GraphedStepOptions& options) {
  return options.replay_check_every == 0 ? nullptr
                                         : std::make_unique<ReplayCheck>(context, parts, options);
}

// A rehearsal must not begin what is once done on all ranks (a new bucket layout), and gradients
// that wait for a later backward would be in it twice.
bool ReplayCheck::can_check() const {
  return std::all_of(parts_.models.begin(), parts_.models.end(), [](DataParallelModel* model) {
    auto& reducer = model->reducer();
    return reducer.is_settled() && reducer.mean().counts().is_none() && !awaits_buffers(*model);
  });
}

bool ReplayCheck::begin_step() {
  const bool is_joining =
      std::any_of(parts_.models.begin(), parts_.models.end(),
                  [](const DataParallelModel* model) { return model->is_joining(); });
  if (!repeats_ || is_joining || parts_.models.empty() || !at::GradMode::is_enabled()) {
    return false;
  }
  return ++num_steps_ % every_ == 0 && can_check();
}

void ReplayCheck::clear(const Probes& probes) const {
  for (const auto& probe : probes) {
    probe->hashes().zero_();
  }
}

at::Tensor ReplayCheck::hashes(const Probes& probes) const {
  std::vector<at::Tensor> all;
  for (const auto& probe : probes) {
    all.push_back(probe->hashes());
  }
  return at::cat(all).cpu();
}

at::Tensor ReplayCheck::rehearse(const Function& rehearsal) {
  const at::NoGradGuard no_grad;
  for (auto* model : parts_.models) {
    model->reducer().join_broken_backward();
    model->reducer().finish_pending();
  }
  Saved saved(parts_, context_.device());
  clear(rehearsed_);
  {
    const Recording recording(*this, /*is_rehearsal=*/true);
    const ops::detail::UncountedOps uncounted;
    const at::AutoGradMode grad(true);
    try {
      rehearsal();
    } catch (const RehearsalEnd&) {
    } catch (...) {
      saved.restore();
      throw;
    }
  }
  const auto result = hashes(rehearsed_);
  saved.restore();
  return result;
}

bool ReplayCheck::agree_any(bool mine) const {
  const auto any =
      at::full({1}, mine ? 1 : 0, at::TensorOptions().dtype(at::kInt).device(context_.device()));
  for (const auto* model : parts_.models) {
    model->communicator()->all_reduce(any, ReduceOp::Max)->wait();
  }
  return any.item<int>() != 0;
}

void ReplayCheck::run(const Function& rehearsal, const Function& step) {
  const auto rehearsed = rehearse(rehearsal);
  if (num_checks_++ == 0) {
    const bool differs = !at::equal(rehearsed, rehearse(rehearsal));
    if (differs) {
      log_warning(
          concat("rank ", context_.rank(), ": ", name_,
                 " gives other gradients when it runs again on the same inputs, so "
                 "train.replay_check_every checks nothing; fix: set train.deterministic=true"));
    }
    repeats_ = !agree_any(differs);
    if (!repeats_) {
      step();
      return;
    }
  }
  clear(real_);
  {
    const Recording recording(*this, /*is_rehearsal=*/false);
    step();
  }
  const auto real = hashes(real_);
  if (!at::equal(rehearsed, real)) {
    fail(rehearsed, real);
  }
}

StepOutput ReplayCheck::run_eager(const StepCall& call, const StepScalars& scalars) {
  StepOutput output;
  run([&] { call.run(scalars); }, [&] { output = call.run(scalars); });
  return output;
}

std::string ReplayCheck::bucket_text(int64_t index) const {
  size_t model = 0;
  while (index >= real_[model]->hashes().numel()) {
    index -= real_[model++]->hashes().numel();
  }
  auto& reducer = parts_.models[model]->reducer();
  const auto& bucket = reducer.gradients().layout().buckets.at(static_cast<size_t>(index));
  const auto name = [&](int parameter) {
    return reducer.gradients().parameters()[static_cast<size_t>(parameter)].name;
  };
  return concat("bucket ", index, reducer.of_model(), " (", name(bucket.parameters.front()),
                bucket.parameters.size() > 1 ? " … " + name(bucket.parameters.back()) : "", ")");
}

void ReplayCheck::fail(const at::Tensor& rehearsed, const at::Tensor& real) const {
  const auto first = rehearsed.ne(real).nonzero()[0].item<int64_t>();
  throw MismatchError(concat(
      "rank ", context_.rank(), " (",
      context_.membership().hosts.at(static_cast<size_t>(context_.rank())), ", ", context_.device(),
      ") computed other gradients when ", name_,
      " ran twice on the same inputs (train.replay_check_every=", every_, "): ", bucket_text(first),
      " differs; fix: leave this device out, because it or its memory is faulty. With "
      "train.deterministic=false first set it to true: a kernel may add in another order "
      "(docs/wrong_bits.md)"));
}

}  // namespace ddp::detail
