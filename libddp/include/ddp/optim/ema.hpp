// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/optim/make_optimizer.hpp"

namespace ddp {

namespace detail {
class FlatAverages;
}

struct EmaOptions {
  double decay = 0.999;  ///< share of the average kept at each update
};
void describe_fields(EmaOptions& options, FieldVisitor& visitor);

/// Exponential moving average of weights: average += (1 - decay) * (weight - average).
///
/// Averages are float32 for bfloat16 and float16 weights, else of the weight's dtype. Integers
/// (batch counters) are copied. Include buffers in the list to average them too.
class Ema : public Stateful {
 public:
  /// Starts the averages as copies of `tensors`.
  explicit Ema(const NamedParameters& tensors, const EmaOptions& options = {});
  template <HasNamedParameters Model>
  explicit Ema(const Model& model, const EmaOptions& options = {})
      : Ema(model.named_parameters(), options) {}
  Ema(const Ema&) = delete;
  Ema& operator=(const Ema&) = delete;

  /// Call after each optimizer step. The host does not wait. Capturable after a first call outside
  /// a capture. On CUDA one kernel updates all averages in float32.
  void update();

  /// Puts the averages into the weights' memory until the returned object is destroyed, which
  /// restores the previous bits. update() throws ddp::Error meanwhile.
  class Swap {
   public:
    Swap(Swap&& other) noexcept;
    Swap& operator=(Swap&&) = delete;
    ~Swap();

   private:
    friend class Ema;
    explicit Swap(Ema* ema);
    Ema* ema_;
    std::vector<at::Tensor> backup_;
  };
  [[nodiscard]] Swap swap_in();

  /// The averages, in the order and with the names of the constructor's list.
  const NamedParameters& averages() const { return averages_; }

  std::string state_name() const override { return "ema"; }
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  void refuse_swapped(const std::string& method) const;

  NamedParameters tensors_;
  NamedParameters averages_;
  double decay_;
  std::shared_ptr<detail::FlatAverages> flat_;
  bool swapped_ = false;
};

}  // namespace ddp
