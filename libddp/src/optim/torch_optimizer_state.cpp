// SPDX-License-Identifier: Apache-2.0
#include "optim/torch_optimizer_state.hpp"

#include <torch/optim.h>

#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {
namespace {

// Calls v(name, slot, required) for every slot of a state, and v.step(count) for its count.
template <typename V>
void visit_slots(torch::optim::SGDParamState& s, V& v) {
  v("momentum_buffer", s.momentum_buffer(), false);
}
template <typename State, typename V>
void visit_adam_slots(State& s, V& v) {
  v.step(s.step());
  v("exp_avg", s.exp_avg(), true);
  v("exp_avg_sq", s.exp_avg_sq(), true);
  v("max_exp_avg_sq", s.max_exp_avg_sq(), false);
}
template <typename V>
void visit_slots(torch::optim::AdamParamState& s, V& v) {
  visit_adam_slots(s, v);
}
template <typename V>
void visit_slots(torch::optim::AdamWParamState& s, V& v) {
  visit_adam_slots(s, v);
}
template <typename V>
void visit_slots(torch::optim::RMSpropParamState& s, V& v) {
  v.step(s.step());
  v("square_avg", s.square_avg(), true);
  v("momentum_buffer", s.momentum_buffer(), false);
  v("grad_avg", s.grad_avg(), false);
}
template <typename V>
void visit_slots(torch::optim::AdagradParamState& s, V& v) {
  v.step(s.step());
  v("sum", s.sum(), true);
}

template <typename State, typename V>
bool visit_as(torch::optim::OptimizerParamState& state, V& v) {
  auto* typed = dynamic_cast<State*>(&state);
  if (typed) {
    visit_slots(*typed, v);
  }
  return typed != nullptr;
}

template <typename V>
void visit_state(torch::optim::OptimizerParamState& state, V& v) {
  const bool known = visit_as<torch::optim::SGDParamState>(state, v) ||
                     visit_as<torch::optim::AdamParamState>(state, v) ||
                     visit_as<torch::optim::AdamWParamState>(state, v) ||
                     visit_as<torch::optim::RMSpropParamState>(state, v) ||
                     visit_as<torch::optim::AdagradParamState>(state, v);
  DDP_CHECK(known, "state of an unknown torch::optim class");
}

struct Reader {
  std::map<std::string, TorchSlot> slots;
  void operator()(const char* name, at::Tensor& tensor, bool required) {
    slots[name] = {tensor, required};
  }
  void step(int64_t& count) { slots["step"] = {at::scalar_tensor(count, at::kLong), true}; }
};

struct Writer {
  const std::map<std::string, at::Tensor>& slots;
  void operator()(const char* name, at::Tensor& tensor, bool /*required*/) {
    const auto found = slots.find(name);
    tensor = found == slots.end() ? at::Tensor() : found->second;
  }
  void step(int64_t& count) { count = slots.at("step").item<int64_t>(); }
};

}  // namespace

std::string torch_optimizer_type(const torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer)) return "sgd";
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer)) return "adam";
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer)) return "adamw";
  if (dynamic_cast<const torch::optim::RMSprop*>(&optimizer)) return "rmsprop";
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer)) return "adagrad";
  throw SettingsError(
      "the state of this torch::optim class cannot be kept in a checkpoint; SGD, "
      "Adam, AdamW, RMSprop and Adagrad can; fix: use one of these, or leave the optimizer out of "
      "the Checkpointer's objects: it then begins again without history when a run resumes");
}

std::unique_ptr<torch::optim::OptimizerParamState> make_torch_state(
    const torch::optim::Optimizer& optimizer) {
  const std::string type = torch_optimizer_type(optimizer);
  if (type == "sgd") return std::make_unique<torch::optim::SGDParamState>();
  if (type == "adam") return std::make_unique<torch::optim::AdamParamState>();
  if (type == "adamw") return std::make_unique<torch::optim::AdamWParamState>();
  if (type == "rmsprop") return std::make_unique<torch::optim::RMSpropParamState>();
  return std::make_unique<torch::optim::AdagradParamState>();
}

std::map<std::string, TorchSlot> read_torch_state(const torch::optim::OptimizerParamState& state) {
  Reader reader;
  // The accessors return references only from a mutable state; the reader changes nothing.
  visit_state(const_cast<torch::optim::OptimizerParamState&>(state), reader);
  return reader.slots;
}

void write_torch_state(torch::optim::OptimizerParamState& state,
                       const std::map<std::string, at::Tensor>& slots) {
  Writer writer{slots};
  visit_state(state, writer);
}

}  // namespace ddp::detail
