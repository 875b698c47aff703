// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <sstream>
#include <utility>

#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "differential/cases.hpp"
#include "support/multi_rank_main.hpp"

namespace differential {
namespace {

using ddp::OptimizerImplementation;
using ddp::OptimizerOptions;
using ddp::OptimizerType;

double length(const torch::Tensor& tensor) {
  return tensor.norm().item<double>();
}

/// One parameter in float64: PyTorch's own SGD, Adam and AdamW, and the formulas of LARS and LAMB.
class Twin {
 public:
  Twin(const torch::Tensor& parameter, const OptimizerOptions& options, double weight_decay)
      : weight_(parameter.detach().to(torch::kDouble).clone().requires_grad_(true)),
        options_(options),
        weight_decay_(weight_decay),
        adapts_(options.adapt_norm_and_bias || parameter.dim() != 1) {
    const std::vector<torch::Tensor> only{weight_};
    if (options.type == OptimizerType::Sgd) {
      torch_ = std::make_unique<torch::optim::SGD>(only, torch::optim::SGDOptions(1)
                                                             .momentum(options.momentum)
                                                             .dampening(options.dampening)
                                                             .nesterov(options.nesterov)
                                                             .weight_decay(weight_decay));
    } else if (options.type == OptimizerType::Adam) {
      torch_ = std::make_unique<torch::optim::Adam>(only, torch::optim::AdamOptions(1)
                                                              .betas({options.beta1, options.beta2})
                                                              .eps(options.eps)
                                                              .amsgrad(options.amsgrad)
                                                              .weight_decay(weight_decay));
    } else if (options.type == OptimizerType::AdamW) {
      torch_ =
          std::make_unique<torch::optim::AdamW>(only, torch::optim::AdamWOptions(1)
                                                          .betas({options.beta1, options.beta2})
                                                          .eps(options.eps)
                                                          .amsgrad(options.amsgrad)
                                                          .weight_decay(weight_decay));
    }
  }

  /// `gradient` may be undefined: then nothing changes.
  void step(const torch::Tensor& gradient, double lr) {
    if (!gradient.defined()) {
      return;
    }
    const auto g = gradient.to(torch::kDouble);
    if (torch_ != nullptr) {
      weight_.mutable_grad() = g;
      torch_->param_groups()[0].options().set_lr(lr);
      torch_->step();
      return;
    }
    const torch::NoGradGuard no_grad;
    if (!first_.defined()) {
      first_ = torch::zeros_like(g);
      second_ = torch::zeros_like(g);
    }
    options_.type == OptimizerType::Lars ? lars(g, lr) : lamb(g, lr);
  }

  const torch::Tensor& weight() const { return weight_; }

 private:
  void lars(const torch::Tensor& g, double lr) {
    const double of_weight = length(weight_), of_gradient = length(g);
    const double ratio = adapts_ && of_weight > 0 && of_gradient > 0
                             ? options_.trust_coefficient * of_weight /
                                   (of_gradient + weight_decay_ * of_weight + options_.eps)
                             : 1;
    first_ = options_.momentum * first_ + lr * ratio * (g + weight_decay_ * weight_);
    weight_.sub_(first_, lr == 0 ? 0 : 1);  // a momentum of earlier rates moves no weight then
  }
  void lamb(const torch::Tensor& g, double lr) {
    ++steps_;
    first_ = options_.beta1 * first_ + (1 - options_.beta1) * g;
    second_ = options_.beta2 * second_ + (1 - options_.beta2) * g.square();
    const auto update =
        first_ / (1 - std::pow(options_.beta1, steps_)) /
            ((second_ / (1 - std::pow(options_.beta2, steps_))).sqrt() + options_.eps) +
        weight_decay_ * weight_;
    const double of_weight = length(weight_), of_update = length(update);
    const double ratio = adapts_ && of_weight > 0 && of_update > 0 ? of_weight / of_update : 1;
    weight_.sub_(update, lr * ratio);
  }

  torch::Tensor weight_, first_, second_;
  OptimizerOptions options_;
  double weight_decay_;
  bool adapts_;
  int64_t steps_ = 0;
  std::unique_ptr<torch::optim::Optimizer> torch_;
};

OptimizerOptions options_of(Draw& draw) {
  OptimizerOptions o;
  o.type =
      draw.one_of<OptimizerType>({OptimizerType::Sgd, OptimizerType::Adam, OptimizerType::AdamW,
                                  OptimizerType::Lars, OptimizerType::Lamb});
  o.weight_decay = draw.chance(0.5) ? 0.05 : 0;
  o.decay_norm_and_bias = draw.chance(0.7);
  if (o.type == OptimizerType::Sgd || o.type == OptimizerType::Lars) {
    o.momentum = draw.chance(0.7) ? 0.9 : 0;
  }
  if (o.type == OptimizerType::Sgd && o.momentum > 0) {
    o.nesterov = draw.chance(0.3);
    o.dampening = !o.nesterov && draw.chance(0.2) ? 0.3 : 0;
  }
  o.amsgrad = (o.type == OptimizerType::Adam || o.type == OptimizerType::AdamW) && draw.chance(0.3);
  o.adapt_norm_and_bias = draw.chance(0.5);
  o.trust_coefficient = 0.1;
  if (draw.chance(0.4)) {
    o.groups = {{.patterns = {"p0", "p2"}, .lr_scale = 0.5, .weight_decay = 0.01}};
  }
  return o;
}

enum class Mode { Alone, Wrapped, Zero };

struct Training {
  ddp::NamedParameters parameters;
  std::vector<Twin> twins;
  std::vector<double> lr_scales;
};

Training make_training(Draw& draw, const OptimizerOptions& options) {
  Training training;
  const auto common = draw.dtype();
  for (int64_t i = draw.number(3, 6); i > 0; --i) {
    std::vector<int64_t> sizes;
    for (int64_t d = draw.number(1, 3); d > 0; --d) {
      sizes.push_back(draw.number(1, 12));
    }
    const auto name = "p" + std::to_string(training.parameters.size());
    const auto values = draw.normal(sizes, draw.chance(0.7) ? common : torch::kFloat);
    const bool in_group = !options.groups.empty() && (name == "p0" || name == "p2");
    training.parameters.push_back({name, values.detach().requires_grad_(true)});
    const double decay = in_group                                            ? 0.01
                         : !options.decay_norm_and_bias && sizes.size() == 1 ? 0
                                                                             : options.weight_decay;
    training.twins.emplace_back(values, options, decay);
    training.lr_scales.push_back(in_group ? 0.5 : 1);
  }
  return training;
}

/// Whether Flat, and so ZeRO-1, takes all parameters.
bool fits_flat(const Training& training, const OptimizerOptions& options) {
  return options.dampening == 0 &&
         std::all_of(training.parameters.begin(), training.parameters.end(), [](const auto& entry) {
           return entry.tensor.scalar_type() != torch::kDouble &&
                  entry.tensor.is_non_overlapping_and_dense();
         });
}

/// How far float32 arithmetic, and the rounding of a 16-bit parameter, may take a parameter.
double tolerance_of(torch::Dtype dtype) {
  return dtype == torch::kDouble ? 1e-9 : dtype == torch::kFloat ? 2e-5 : rounding_of(dtype);
}

}  // namespace

std::string check_optimizer(Draw& draw, std::string* text, double* worst) {
  auto options = options_of(draw);
  auto training = make_training(draw, options);
  auto mode = draw.one_of<Mode>({Mode::Alone, Mode::Alone, Mode::Wrapped, Mode::Zero});
  const bool flat = fits_flat(training, options);
  if (mode == Mode::Zero &&
      (!flat || options.type == OptimizerType::Lars || options.type == OptimizerType::Lamb)) {
    mode = Mode::Wrapped;
  }
  options.zero1 = mode == Mode::Zero;
  if (mode != Mode::Zero && flat && draw.chance(0.5)) {
    options.implementation = OptimizerImplementation::Flat;
  } else if (mode != Mode::Zero && draw.chance(0.4)) {
    options.implementation = OptimizerImplementation::List;
  }
  std::ostringstream out;
  out << "type " << static_cast<int>(options.type) << " mode " << static_cast<int>(mode)
      << " implementation " << static_cast<int>(options.implementation) << " momentum "
      << options.momentum << " decay " << options.weight_decay << " amsgrad " << options.amsgrad
      << " nesterov " << options.nesterov << " groups " << options.groups.size();
  for (const auto& [name, tensor] : training.parameters) {
    out << ", " << tensor.scalar_type() << " " << tensor.sizes() << " " << tensor.strides();
  }
  *text = out.str();

  std::optional<ddp::DataParallelModel> model;
  std::unique_ptr<ddp::Optimizer> optimizer;
  if (mode == Mode::Alone) {
    optimizer = ddp::make_optimizer(training.parameters, options);
  } else {
    model.emplace(ddp::ModelTensors{.parameters = training.parameters},
                  ddp::test::context().communicator());
    optimizer = ddp::make_optimizer(*model, options);
  }
  for (int64_t step = draw.number(1, 6); step > 0; --step) {
    const double lr = draw.one_of<double>({0.25, 0.03125, 0.0078125, 0});
    optimizer->zero_grad();
    torch::Tensor loss =
        torch::zeros({}, torch::TensorOptions(torch::kDouble).device(draw.device()));
    for (std::size_t i = 0; i < training.parameters.size(); ++i) {
      auto& parameter = training.parameters[i].tensor;
      const bool used = mode != Mode::Alone || draw.chance(0.9);
      const auto gradient =
          used ? draw.normal(parameter.sizes(), parameter.scalar_type()) : torch::Tensor();
      training.twins[i].step(gradient, lr * training.lr_scales[i]);
      if (mode == Mode::Alone) {
        parameter.mutable_grad() = gradient;
      } else {
        loss = loss + (parameter * gradient).sum(torch::kDouble);
      }
    }
    if (model) {
      model->prepare_for_backward({loss});
      loss.backward();
    }
    optimizer->step(lr);
  }
  for (std::size_t i = 0; i < training.parameters.size(); ++i) {
    const auto& [name, tensor] = training.parameters[i];
    // A weight that steps of about 1 bring near 0 keeps the rounding error of the larger numbers.
    const double error = error_of(tensor, training.twins[i].weight(), 5e-2);
    const double tolerance = tolerance_of(tensor.scalar_type());
    *worst = std::max(*worst, error / tolerance);
    if (!(error <= tolerance)) {
      std::ostringstream difference;
      difference << name << " differs by " << error << ", more than " << tolerance;
      return difference.str();
    }
  }
  return {};
}

}  // namespace differential
