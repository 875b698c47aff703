// SPDX-License-Identifier: Apache-2.0
// The state that PowerSGD keeps from one backward to the next.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ddp/amp/amp.hpp"
#include "ddp/reduce/join.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "reduce/hooks/comm_hook_table.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using Gradients = std::vector<torch::Tensor>;

// Two matrices, one of them in channels_last order, and a vector that is sent in full.
struct Compressed {
  explicit Compressed(double cap = 25) {
    weights = {torch::zeros({16, 12}, on_device()),
               torch::zeros({8, 6, 3, 3}, on_device()).contiguous(at::MemoryFormat::ChannelsLast),
               torch::zeros({12}, on_device())};
    NamedParameters parameters;
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i].set_requires_grad(true);
      parameters.push_back({"w" + std::to_string(i), weights[i]});
    }
    model = std::make_unique<DataParallelModel>(ModelTensors{.parameters = parameters}, group(),
                                                with_cap(cap));
    model->register_comm_hook(
        ddp::detail::make_powersgd_hook({.rank = 2, .start_step = 1, .min_compression_rate = 0.1}));
  }

  // The gradients are integers of (rank, step, weight). One element of weight `spoilt` is `value`
  // on the last rank.
  torch::Tensor loss(int64_t step, int spoilt = -1, float value = 0) {
    auto sum = torch::zeros({}, on_device());
    for (size_t i = 0; i < weights.size(); ++i) {
      auto gradient =
          integers(weights[i].sizes().vec(), 1000 * step + 10 * rank() + static_cast<int64_t>(i));
      if (static_cast<int>(i) == spoilt && rank() == world() - 1) {
        gradient.view({-1})[3] = value;
      }
      sum = sum + (weights[i] * gradient).sum();
    }
    return sum;
  }
  std::vector<torch::Tensor> backward(const torch::Tensor& loss) {
    model->zero_grad();
    model->prepare_for_backward({loss});
    loss.backward();
    std::vector<torch::Tensor> gradients;
    for (const auto& weight : weights) {
      gradients.push_back(weight.grad().clone());
    }
    return gradients;
  }

  std::vector<torch::Tensor> weights;
  std::unique_ptr<DataParallelModel> model;
};

// An fp16 matrix whose gradients are sent as fp16 and compressed from the first backward on.
struct CompressedHalf {
  CompressedHalf() {
    DdpOptions options;
    options.fp32_grads = false;
    model = std::make_unique<DataParallelModel>(ModelTensors{.parameters = {{"weight", weight}}},
                                                group(), options);
    model->register_comm_hook(
        ddp::detail::make_powersgd_hook({.rank = 1, .start_step = 0, .min_compression_rate = 0.1}));
  }

  torch::Tensor weight = torch::zeros({64, 64}, on_device().dtype(torch::kHalf)).requires_grad_();
  std::unique_ptr<DataParallelModel> model;
};

bool all_finite(const std::vector<torch::Tensor>& gradients) {
  return std::all_of(gradients.begin(), gradients.end(), [](const torch::Tensor& gradient) {
    return gradient.isfinite().all().item<bool>();
  });
}

}  // namespace

TEST_CASE("powersgd: a backward that was not finite leaves no trace in the next ones") {
  const double cap = GENERATE(25.0, 1.0 / (1 << 20));  // in one bucket; each in its own
  for (const int spoilt : {0, 1, 2}) {
    for (const float value : {kNan, kInf, -kInf, std::numeric_limits<float>::max()}) {
      for (const int64_t when : {2, 4}) {  // the second and the fourth compressed backward
        CAPTURE(cap, spoilt, value, when);
        Compressed broken(cap);
        Compressed plain(cap);
        for (int64_t step = 0; step < 8; ++step) {
          CAPTURE(step);
          if (step == when) {
            const bool finite = all_finite(broken.backward(broken.loss(50, spoilt, value)));
            CHECK((!finite || std::isfinite(value)));
          }
          const auto gradients = broken.backward(broken.loss(step));
          REQUIRE(all_finite(gradients));
          if (!std::isfinite(value)) {
            require_equal(gradients, plain.backward(plain.loss(step)));
          }
        }
      }
    }
  }
}

TEST_CASE("powersgd: gradients of zero, as of a frozen parameter, are no end") {
  for (const int64_t zeros : {1, 3}) {
    Compressed starved;
    Compressed plain;
    for (int64_t step = 0; step < 6; ++step) {
      CAPTURE(zeros, step);
      const bool is_zero = step >= 1 && step <= zeros;
      const auto gradients = starved.backward(starved.loss(step) * (is_zero ? 0 : 1));
      const auto expected = plain.backward(plain.loss(step));
      for (size_t i = 0; i < gradients.size(); ++i) {
        CHECK(gradients[i].any().item<bool>() == !is_zero);
        CHECK(expected[i].any().item<bool>());
      }
    }
  }
}

TEST_CASE("powersgd: fp16 gradients of zero and with norms beyond fp16 stay finite") {
  CompressedHalf half;
  // From the second 4096 on the elements of P and Q are 32768, and their norms 262144.
  for (const double value : {0.0, 4096.0, 4096.0, 1.0}) {
    CAPTURE(value);
    half.model->zero_grad();
    auto loss = (half.weight * value).sum();
    half.model->prepare_for_backward({loss});
    loss.backward();
    CHECK(torch::allclose(half.weight.grad(), torch::full_like(half.weight, value), 0.01));
  }
}

TEST_CASE("powersgd: the first error of fp16 is zero under any loss scale") {
  CompressedHalf half;
  AmpOptions amp;
  amp.grad_scaling = GradScaling::On;
  amp.init_scale = 65536;
  GradScaler scaler(amp);
  const auto loss = (half.weight.to(torch::kFloat) * std::pow(2.0, -16)).sum();
  half.model->prepare_for_backward({loss});
  scaler.scale(loss).backward();
  CHECK(torch::allclose(half.weight.grad(), torch::ones_like(half.weight), 0.01));
}

/// Two models whose losses differ by the loss scale alone.
struct ScaledAndPlain {
  static AmpOptions options() {
    AmpOptions options;
    options.grad_scaling = GradScaling::On;
    options.init_scale = 1024;
    return options;
  }

  void require_equal_gradients(int64_t step, double scale, double weight = 1) {
    CAPTURE(step, scale, weight);
    if (step > 0) {
      scaler.update(scale);
    }
    auto gradients = scaled.backward(scaler.scale(scaled.loss(step) * weight));
    for (auto& gradient : gradients) {
      gradient.div_(scale);
    }
    require_equal(gradients, plain.backward(plain.loss(step) * weight));
  }

  GradScaler scaler{options()};
  Compressed scaled;
  Compressed plain;
};

// A rank that ran out of inputs in join(model, loop) runs no backward of its own, so it does not
// know the scale.
TEST_CASE("powersgd: a loss scale changes no gradient where ranks without input take every step") {
  ScaledAndPlain models;
  const std::vector<double> scales{1024, 1024, 512, 512, 65536, 65536, 1, 256};
  size_t step = 0;
  const auto take_step = [&](bool has_batch) {
    models.require_equal_gradients(static_cast<int64_t>(step), scales[step], has_batch ? 1 : 0);
    ++step;
  };
  join(*models.scaled.model, take_step, [&] { return step < (rank() == 0 ? scales.size() : 2); });
  CHECK(step == scales.size());
}

TEST_CASE("powersgd: the gradients do not depend on the loss scale, which changes") {
  ScaledAndPlain models;
  int64_t step = 0;
  for (const double scale : {1024, 1024, 1024, 512, 512, 65536, 65536, 1, 1, 256}) {
    models.require_equal_gradients(step++, scale);
  }
  // A backward without the scaler has the scale 1 again, also after another model's that threw.
  auto other = torch::ones({}, on_device()).requires_grad_();
  other.register_hook([](const torch::Tensor&) { throw std::runtime_error("half-way"); });
  CHECK_THROWS_WITH(models.scaler.scale(other * 2).backward(), Catch::Contains("half-way"));
  require_equal(models.scaled.backward(models.scaled.loss(step)),
                models.plain.backward(models.plain.loss(step)));
}

TEST_CASE("powersgd: means by counts do not depend on the unit of the counts, which changes") {
  const bool scales_loss = GENERATE(false, true);
  AmpOptions options;
  options.grad_scaling = GradScaling::On;
  options.init_scale = 1024;
  GradScaler scaler(options);
  Compressed counted(1.0 / (1 << 20));
  Compressed plain(1.0 / (1 << 20));
  const double units[] = {1, 1, 64, 64, 0.25, 1, 1024, 1};
  int64_t step = 0;
  for (const double unit : units) {
    CAPTURE(step, unit, scales_loss);
    counted.model->zero_grad();
    const auto loss = counted.loss(step) * unit;
    counted.model->prepare_for_backward({loss});
    counted.model->weighted_backward(scales_loss ? scaler.scale(loss) : loss, unit);
    Gradients gradients;
    for (const auto& weight : counted.weights) {
      gradients.push_back(weight.grad() / (scales_loss ? options.init_scale : 1));
    }
    require_equal(gradients, plain.backward(plain.loss(step)));
    ++step;
  }
}

TEST_CASE("powersgd: a weighted backward without an item leaves zeros and changes no state") {
  Compressed starved;
  Compressed plain;
  for (int64_t step = 0; step < 6; ++step) {
    CAPTURE(step);
    if (step == 3) {
      starved.model->zero_grad();
      const auto loss = starved.loss(50) * 0;
      starved.model->prepare_for_backward({loss});
      starved.model->weighted_backward(loss, 0);
      for (const auto& weight : starved.weights) {
        CHECK_FALSE(weight.grad().any().item<bool>());
      }
    }
    require_equal(starved.backward(starved.loss(step)), plain.backward(plain.loss(step)));
  }
}
