// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace ddp::ops::detail {

/// The states of several devices. `State` is made for one device, reads its state then, and writes
/// it back in restore().
template <typename State>
class DeviceStates {
 public:
  /// Of the CPU, whose draws may decide what a function computes on a GPU, and of `inputs`'
  /// devices.
  static DeviceStates of_devices(at::TensorList inputs) {
    DeviceStates states;
    states.add(at::kCPU);
    for (const auto& input : inputs) {
      if (input.defined()) {
        states.add(input.device());
      }
    }
    return states;
  }

  /// The same devices' states now.
  DeviceStates now() const {
    DeviceStates states;
    for (const auto& state : states_) {
      states.states_.emplace_back(state.device());
    }
    return states;
  }
  void restore() const {
    for (const auto& state : states_) {
      state.restore();
    }
  }

 private:
  void add(at::Device device) {
    const auto is_known = [device](const State& state) { return state.device() == device; };
    if (std::none_of(states_.begin(), states_.end(), is_known)) {
      states_.emplace_back(device);
    }
  }

  std::vector<State> states_;
};

/// Of a device's default generator.
class RandomState {
 public:
  explicit RandomState(at::Device device) : device_(device) {
    use_generator([this](at::Generator& generator) { state_ = generator.get_state(); });
  }
  at::Device device() const { return device_; }
  void restore() const {
    use_generator([this](at::Generator& generator) { generator.set_state(state_); });
  }

 private:
  template <typename Use>
  void use_generator(const Use& use) const {
    auto generator = at::globalContext().defaultGenerator(device_);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    use(generator);
  }

  at::Device device_;
  at::Tensor state_;
};
using RandomStates = DeviceStates<RandomState>;

/// Restores the generators' later states, also after an exception.
class RandomStatesAs {
 public:
  explicit RandomStatesAs(const RandomStates& states) : later_(states.now()) { states.restore(); }
  ~RandomStatesAs() { later_.restore(); }
  RandomStatesAs(const RandomStatesAs&) = delete;
  RandomStatesAs& operator=(const RandomStatesAs&) = delete;

 private:
  RandomStates later_;
};

}  // namespace ddp::ops::detail
