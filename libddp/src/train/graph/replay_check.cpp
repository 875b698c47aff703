// SPDX-License-Identifier: Apache-2.0
#include "train/graph/replay_check.hpp"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <iterator>
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

// With those of ddp.parameters_to_ignore.
std::vector<at::Tensor> buffers_of(const DataParallelModel& model) {
  const auto& tensors = all_tensors(model);
  std::vector<at::Tensor> buffers;
  for (const auto& entry : tensors.read_buffers ? tensors.read_buffers() : tensors.buffers) {
    buffers.push_back(entry.tensor);
  }
  return buffers;
}

bool can_be_written(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() &&
         at::has_internal_overlap(tensor) != at::MemOverlap::Yes;
}

// Then two runs of a step differ only on a device that is faulty.
bool is_deterministic() {
  const auto& torch = at::globalContext();
  return torch.deterministicAlgorithms() && !torch.deterministicAlgorithmsWarnOnly();
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
    std::vector<at::Tensor> buffer_values;
  };
  struct Gradient {
    at::Tensor parameter;
    at::Tensor grad;
    at::Tensor values;
  };
  using Generator = std::pair<at::Generator, at::Tensor>;  // and its state

  Saved(const GraphedParts& parts, const std::vector<at::Tensor>& inputs_in, at::Device device)
      : random(ops::detail::RandomStates::of_devices(
            {at::empty({0}, at::TensorOptions().device(device))})) {
    for (auto* model : parts.models) {
      models.push_back({model, model->reducer().state(), copies_of(buffers_of(*model))});
      add_gradients(model->named_parameters());
    }
    for (const auto* optimizer : parts.optimizers) {  // of modules that are not wrapped
      add_gradients(optimizer->named_parameters());
    }
    std::copy_if(inputs_in.begin(), inputs_in.end(), std::back_inserter(inputs), can_be_written);
    input_values = copies_of(inputs);
    for (at::Generator generator : parts.generators) {
      const std::lock_guard lock(generator.mutex());
      generators.emplace_back(generator, generator.get_state());
    }
  }

  void add_gradients(const NamedParameters& parameters) {
    for (const auto& [name, parameter] : parameters) {
      const at::Tensor& grad = parameter.grad();
      gradients.push_back({parameter, grad, grad.defined() ? grad.clone() : at::Tensor()});
    }
  }

  void restore() {
    for (const Model& saved : models) {
      saved.model->reducer().restore(saved.state);
      copy_back(buffers_of(*saved.model), saved.buffer_values);
    }
    for (const Gradient& saved : gradients) {
      saved.parameter.mutable_grad() = saved.grad;
      if (saved.grad.defined()) {
        saved.grad.copy_(saved.values);
      }
    }
    copy_back(inputs, input_values);
    random.restore();
    for (auto& [generator, state] : generators) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

  std::vector<Model> models = {};
  std::vector<Gradient> gradients = {};
  std::vector<at::Tensor> inputs = {};
  std::vector<at::Tensor> input_values = {};
  ops::detail::RandomStates random;
  std::vector<Generator> generators = {};
};

ReplayCheck::ReplayCheck(Context& context, const GraphedParts& parts,
                         const GraphedStepOptions& options)
    : context_(context), parts_(parts), every_(options.replay_check_every), name_(options.name) {
  const auto rehearsal_is_open = std::make_shared<bool>(false);
  const auto step_is_open = std::make_shared<bool>(false);
  for (auto* model : parts_.models) {
    const auto& gradients = model->reducer().gradients();
    if (!sparse_indices(gradients).empty()) {
      throw SettingsError(
          "train.replay_check_every does not support ddp.sparse=gather, whose rows are in no "
          "bucket; fix: set train.replay_check_every=0, or sparse(false) in the embeddings");
    }
    const size_t max_buckets = gradients.parameters().size();
    for (const bool is_rehearsal : {true, false}) {
      (is_rehearsal ? rehearsed_ : real_)
          .push_back(
              std::make_unique<GradientProbe>(is_rehearsal, max_buckets, context.device(),
                                              is_rehearsal ? rehearsal_is_open : step_is_open));
    }
  }
}

ReplayCheck::~ReplayCheck() = default;

ReplayCheck::Recording::Recording(const ReplayCheck& check, bool is_rehearsal) : check_(check) {
  for (size_t i = 0; i < check_.parts_.models.size(); ++i) {
    const auto& probe = check_.probes(is_rehearsal)[i];
    probe->open();
    check_.parts_.models[i]->reducer().reductions().set_probe(probe.get());
  }
}

ReplayCheck::Recording::~Recording() {
  for (auto* model : check_.parts_.models) {
    model->reducer().reductions().set_probe(nullptr);
  }
}

std::unique_ptr<ReplayCheck> make_replay_check(Context& context, const GraphedParts& parts,
                                               const GraphedStepOptions& options) {
  return options.replay_check_every == 0 ? nullptr
                                         : std::make_unique<ReplayCheck>(context, parts, options);
}

// A rehearsal must not begin what is once done on all ranks (a new bucket layout). Under no_sync()
// nothing is reduced, and so nothing is hashed.
bool ReplayCheck::can_check() const {
  const auto& models = parts_.models;
  return std::all_of(models.begin(), models.end(),
                     [](DataParallelModel* model) {
                       return model->reducer().is_settled() && !awaits_buffers(*model);
                     }) &&
         std::any_of(models.begin(), models.end(), [](const DataParallelModel* model) {
           return model->require_backward_grad_sync();
         });
}

bool ReplayCheck::begin_step() {
  const bool is_joining =
      std::any_of(parts_.models.begin(), parts_.models.end(),
                  [](const DataParallelModel* model) { return model->is_joining(); });
  if (is_joining || parts_.models.empty() || !at::GradMode::is_enabled()) {
    return false;
  }
  is_due_ = ++num_steps_ % every_ == 0 || is_due_;
  return is_due_ && can_check();
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

at::Tensor ReplayCheck::rehearse(const Function& rehearsal, const std::vector<at::Tensor>& inputs) {
  const at::NoGradGuard no_grad;
  for (auto* model : parts_.models) {
    model->reducer().join_broken_backward();
    model->reducer().finish_pending();
  }
  Saved saved(parts_, inputs, context_.device());
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

// Micro-batches under no_sync() inside the lambda reduce nothing, so a later call is rehearsed. All
// ranks agree on this without a collective, because they reduce in the same calls.
bool ReplayCheck::has_gradients(const at::Tensor& rehearsed) {
  constexpr int64_t kMaxEmpty = 64;
  if (rehearsed.any().item<bool>()) {
    num_empty_ = 0;
    is_due_ = false;
    return true;
  }
  if (++num_empty_ == kMaxEmpty && context_.is_main()) {
    log_warning(concat("train.replay_check_every=", every_, " checks nothing: ", kMaxEmpty,
                       " calls of ", name_,
                       " reduced no gradients; fix: list the models that it trains in "
                       "GraphedParts::models, or set train.replay_check_every=0"));
  }
  is_due_ = num_empty_ < kMaxEmpty;
  return false;
}

bool ReplayCheck::repeats(const at::Tensor& rehearsed, const at::Tensor& again) {
  const bool differs = !at::equal(rehearsed, again);
  if (differs && is_deterministic()) {
    fail(rehearsed, again);
  }
  if (differs && !std::exchange(has_warned_, true)) {
    log_warning(concat(
        "rank ", context_.rank(), ": ", name_, " gives other gradients when it runs again on the ",
        "same inputs. A kernel may add in another order, so train.replay_check_every=", every_,
        " finds no faulty device; fix: set train.deterministic=true"));
  }
  return !agree_any(differs);
}

void ReplayCheck::run(const Function& rehearsal, const Function& step,
                      const std::vector<at::Tensor>& inputs) {
  const auto rehearsed = rehearse(rehearsal, inputs);
  const bool is_checked = has_gradients(rehearsed);
  if (is_checked && !has_repeated_) {
    has_repeated_ = repeats(rehearsed, rehearse(rehearsal, inputs));
  }
  if (!is_checked || !has_repeated_) {
    step();
    return;
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
  last_equal_step_ = num_steps_;
}

StepOutput ReplayCheck::run_eager(const StepCall& call, const StepScalars& scalars) {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor* input : call.inputs) {
    inputs.push_back(*input);
  }
  StepOutput output;
  run([&] { call.run(scalars); }, [&] { output = call.run(scalars); }, inputs);
  return output;
}

std::string ReplayCheck::bucket_text(int64_t index) const {
  size_t model = 0;
  while (index >= real_[model]->hashes().numel()) {
    index -= real_[model++]->hashes().numel();
  }
  const auto& gradients = parts_.models[model]->reducer().gradients();
  const std::string& label = *gradients.bucket(static_cast<int>(index)).label;
  const auto colon = label.find(": ");
  return concat(label.substr(0, colon), " (", label.substr(colon + 2), ")");
}

void ReplayCheck::fail(const at::Tensor& rehearsed, const at::Tensor& real) const {
  const auto first = rehearsed.ne(real).nonzero()[0].item<int64_t>();
  throw MismatchError(concat(
      "rank ", context_.rank(), " (",
      context_.membership().hosts.at(static_cast<size_t>(context_.rank())), ", ", context_.device(),
      ") computed other gradients when ", name_,
      " ran twice on the same inputs (train.replay_check_every=", every_,
      last_equal_step_ > 0 ? concat(", equal in call ", last_equal_step_) : "",
      "): ", bucket_text(first), " differs; ",
      is_deterministic()
          ? "fix: leave this device out, because it or its memory is faulty. Only a step that "
            "reads what changes between two runs (a counter, the clock) differs without a fault"
          : "either this device or its memory is faulty, or a kernel adds in another order; fix: "
            "resume with train.deterministic=true, with which only a faulty device differs",
      " (docs/wrong_bits.md)"));
}

}  // namespace ddp::detail
