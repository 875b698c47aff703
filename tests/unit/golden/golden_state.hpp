// SPDX-License-Identifier: Apache-2.0
// The states that the checkpoints in tests/golden/checkpoints hold, from the formulas alone.
#pragma once

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>

#include "golden/checkpoint_formula.hpp"
#include "support/same_bits.hpp"

namespace golden {

using Tensors = std::map<ddp::StateKey, at::Tensor>;

/// A program's own object: keeps what it is given.
struct Own : ddp::Stateful {
  std::string state_name() const override { return "own"; }
  ddp::StateDict state_dict() const override { return state; }
  void load_state_dict(const ddp::StateDict& loaded) override { state = loaded; }
  ddp::StateDict state;
};

/// The numbers of one element of Net after `kSgdSteps` steps of SGD.
struct SgdElement {
  double weight = 0;
  double momentum = 0;
  double average = 0;
};

inline SgdElement after_sgd(int64_t i, int64_t salt) {
  SgdElement element{.weight = value(i, salt), .momentum = 0, .average = value(i, salt)};
  for (int64_t step = 0; step < kSgdSteps; ++step) {
    element.momentum =
        kMomentum * element.momentum + coefficient(i, salt) + kWeightDecay * element.weight;
    element.weight -= kLr * element.momentum;
    element.average += (1 - kEmaDecay) * (element.weight - element.average);
  }
  return element;
}

/// The first step of Adam moves each weight by the learning rate, against the gradient's sign.
inline double after_adam(int64_t i, int64_t salt, double weight_decay) {
  return value(i, salt) * (1 - kLr * weight_decay) - std::copysign(kLr, coefficient(i, salt));
}

/// The slots of a parameter after the first step of Adam or LAMB, without its weight.
inline void add_adam_slots(Tensors& state, const std::string& name, at::IntArrayRef shape,
                           const std::function<double(int64_t)>& gradient) {
  const auto prefix = "state." + name + ".";
  state[prefix + "exp_avg"] = filled(shape, [&](int64_t i) { return (1 - kBeta1) * gradient(i); });
  state[prefix + "exp_avg_sq"] =
      filled(shape, [&](int64_t i) { return (1 - kBeta2) * gradient(i) * gradient(i); });
  state[prefix + "step"] = at::scalar_tensor(1.0, at::kFloat);
}

/// Calls `function(name, shape, salt)` for each parameter of Net that is trained.
template <typename F>
void for_each_trained(F&& function) {
  for (int64_t salt = 0; const auto& [name, shape] : parameters()) {
    if (!is_frozen(name)) {
      function(name, at::IntArrayRef(shape), salt);
    }
    ++salt;
  }
}

inline void add_buffers(Tensors& model, at::ScalarType dtype) {
  for (const auto* name : {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}) {
    model[name] = NetImpl::buffer(name, dtype);
  }
}

inline void add_frozen(Tensors& model, at::ScalarType dtype) {
  const auto salt = static_cast<int64_t>(parameters().size()) - 1;
  model["frozen.weight"] = filled(
      {2, 3}, [&](int64_t i) { return value(i, salt); }, dtype);
}

/// The state of an optimizer of bfloat16 leaves after one step of Adam: slots and masters.
/// `gradient_factor` multiplies the coefficients.
inline Tensors adam_state_with_masters(double weight_decay, double gradient_factor) {
  Tensors state;
  for_each_trained([&](const std::string& name, at::IntArrayRef shape, int64_t salt) {
    add_adam_slots(state, name, shape,
                   [&](int64_t i) { return gradient_factor * coefficient(i, salt); });
    state["state." + name + ".master"] =
        filled(shape, [&](int64_t i) { return after_adam(i, salt, weight_decay); });
  });
  return state;
}

/// The trained leaves that belong to it.
inline Tensors adam_leaves(double weight_decay) {
  Tensors model;
  for_each_trained([&](const std::string& name, at::IntArrayRef shape, int64_t salt) {
    model[name] = filled(
        shape, [&](int64_t i) { return after_adam(i, salt, weight_decay); }, at::kBFloat16);
  });
  return model;
}

inline bool same_value(const ddp::StateValue& a, const ddp::StateValue& b) {
  const auto* x = std::get_if<double>(&a);
  const auto* y = std::get_if<double>(&b);
  return x != nullptr && y != nullptr ? std::memcmp(x, y, sizeof *x) == 0 : a == b;
}

/// Without parts: those of one rank, joined.
inline ddp::StateDict whole_of(const ddp::StateDict& state) {
  ddp::StateDict whole{.tensors = state.tensors, .values = state.values};
  for (const auto& [key, parts] : state.parts) {
    whole.tensors[key] = state.whole(key);
  }
  return whole;
}

/// The first key whose tensor or value differs in presence, type or any bit; empty if none does.
inline std::string first_difference(const ddp::StateDict& state, const ddp::StateDict& expected) {
  for (const auto& [key, tensor] : expected.tensors) {
    const auto found = state.tensors.find(key);
    if (found == state.tensors.end() || !testing::same_bits(found->second.detach(), tensor)) {
      return key.text();
    }
  }
  for (const auto& [key, value] : expected.values) {
    const auto found = state.values.find(key);
    if (found == state.values.end() || !same_value(found->second, value)) {
      return key;
    }
  }
  const bool same_size = state.tensors.size() == expected.tensors.size() &&
                         state.values.size() == expected.values.size();
  return same_size ? "" : "another number of entries";
}

/// Eight numbers from a generator in the state that a checkpoint of `rank` holds.
inline at::Tensor next_random_numbers(int rank) {
  torch::manual_seed(kSeed + static_cast<uint64_t>(rank));
  torch::rand({3});
  return torch::randint(1 << 20, {8});
}

/// Copies a file or folder of tests/golden/checkpoints, because a resumed run writes to it.
inline std::string copy_of(const std::string& name, const std::string& folder) {
  const auto path = folder + "/" + name;
  std::filesystem::copy(std::string(DDP_GOLDEN_DIR) + "/checkpoints/" + name, path,
                        std::filesystem::copy_options::recursive);
  return path;
}

}  // namespace golden
