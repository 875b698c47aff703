// SPDX-License-Identifier: Apache-2.0
// Objects that a Checkpointer saves, for its tests.
#pragma once

#include <torch/torch.h>

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "ddp/train/checkpoint.hpp"
#include "support/same_bits.hpp"
#include "train/checkpoint/checkpoint_files.hpp"
#include "unit/train/temporary_folder.hpp"

namespace testing {

using ddp::CheckpointOptions;
using ddp::StateDict;

// An object that stores exactly the given state.
struct Box : ddp::Stateful {
  Box(std::string name_in, StateDict state_in)
      : name(std::move(name_in)), state(std::move(state_in)) {}
  std::string state_name() const override { return name; }
  StateDict state_dict() const override { return state; }
  void load_state_dict(const StateDict& loaded) override {
    for (const auto& [key, tensor] : state.tensors) {
      const auto found = loaded.tensors.find(key);
      if (found == loaded.tensors.end()) {
        throw ddp::MismatchError("missing key " + key.text());
      }
      if (found->second.sizes() != tensor.sizes() ||
          found->second.scalar_type() != tensor.scalar_type()) {
        throw ddp::MismatchError("other shape or dtype of " + key.text());
      }
    }
    for (const auto& [key, tensor] : loaded.tensors) {
      if (state.tensors.count(key) == 0) {
        throw ddp::MismatchError("unexpected key " + key.text());
      }
    }
    for (auto& [key, tensor] : state.tensors) {
      tensor.copy_(loaded.tensors.at(key));
    }
    state.values = loaded.values;
  }
  std::string name;
  StateDict state;
};

inline Box small_model() {
  return {"model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}}};
}

// A small training run with every kind of state: dropout, momentum, a loader position.
struct Run {
  Run() : Run(at::TensorOptions()) {}
  explicit Run(at::TensorOptions options) {
    torch::manual_seed(7);
    weight = torch::randn({4, 6}).to(options);
    momentum = torch::zeros({4, 6}, at::kFloat);
  }
  void step() {
    const auto input = torch::randn({8, 6});
    const auto output = torch::dropout(input.matmul(weight.to(at::kFloat).t()), 0.3, true);
    momentum.mul_(0.9).add_(output.t().matmul(input), 0.01);
    weight.sub_((0.1 * momentum).to(weight.scalar_type()));
    position += 8;
    losses.push_back(output.sum().item<double>());
  }
  Box model() { return {"model", {.tensors = {{"fc.weight", weight}}, .values = {}}}; }
  Box optimizer() {
    return {"optimizer",
            {.tensors = {{"state.fc.weight.momentum_buffer", momentum}}, .values = {}}};
  }
  at::Tensor weight, momentum;
  int64_t position = 0;
  std::vector<double> losses;
};

struct Loader : ddp::Stateful {
  explicit Loader(int64_t& position_in) : position(position_in) {}
  std::string state_name() const override { return "loader"; }
  StateDict state_dict() const override {
    return {.tensors = {}, .values = {{"position", position}}};
  }
  void load_state_dict(const StateDict& state) override {
    position = std::get<int64_t>(state.values.at("position"));
  }
  int64_t& position;
};

inline CheckpointOptions options_in(const TemporaryFolder& folder) {
  CheckpointOptions options;
  options.dir = folder.file("ckpt");
  return options;
}

inline std::vector<std::string> names_in(const std::string& dir) {
  std::vector<std::string> names;
  for (const auto& folder : ddp::detail::list_checkpoints(dir)) {
    names.push_back(folder.name);
  }
  return names;
}

template <typename E>
std::string message_of(const std::exception_ptr& error) {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
  } catch (const E& expected) {
    return expected.what();
  }
  return "";
}

}  // namespace testing
