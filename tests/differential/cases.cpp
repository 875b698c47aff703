// SPDX-License-Identifier: Apache-2.0
#include "differential/cases.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <utility>

#include "ddp/amp/amp.hpp"
#include "ddp/ops/language.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "support/multi_rank_main.hpp"

namespace differential {

Draw::Draw(uint64_t seed, at::Device device)
    : choices_(seed), numbers_(at::detail::createCPUGenerator(seed)), device_(device) {}

int64_t Draw::number(int64_t first, int64_t last) {
  // std::uniform_int_distribution differs between libraries.
  return first + static_cast<int64_t>(choices_() % static_cast<uint64_t>(last - first + 1));
}

bool Draw::chance(double share) {
  return static_cast<double>(choices_() >> 11U) * 0x1p-53 < share;
}

int64_t Draw::size(int64_t last) {
  return chance(0.6) ? 8 * number(1, std::max<int64_t>(last / 8, 1)) : number(1, last);
}

torch::Dtype Draw::dtype() {
  return device_.is_cuda()
             ? one_of<torch::Dtype>({torch::kFloat, torch::kBFloat16, torch::kBFloat16,
                                     torch::kHalf, torch::kHalf, torch::kDouble})
             : one_of<torch::Dtype>(
                   {torch::kFloat, torch::kFloat, torch::kDouble, torch::kBFloat16});
}

torch::Tensor Draw::dense(torch::IntArrayRef sizes, torch::Dtype dtype, double scale) {
  return (torch::randn(sizes, numbers_, torch::kDouble) * scale).to(device_, dtype);
}

torch::Tensor Draw::normal(torch::IntArrayRef sizes, torch::Dtype dtype, double scale) {
  return with_layout(dense(sizes, dtype, scale));
}

torch::Tensor Draw::with_layout(const torch::Tensor& values) {
  if (values.dim() == 0) {
    return values;
  }
  const auto filled = [&](const torch::Tensor& memory) {
    memory.copy_(values);
    return memory;
  };
  const auto sizes = values.sizes().vec();
  switch (number(0, 5)) {
    case 0: {  // part of a flat buffer
      const int64_t offset = number(1, 9);
      return filled(torch::zeros({offset + values.numel()}, values.options())
                        .narrow(0, offset, values.numel())
                        .view(sizes));
    }
    case 1: {  // a slice in one dimension
      auto wide = sizes;
      const auto dim = static_cast<std::size_t>(number(0, values.dim() - 1));
      const int64_t before = number(0, 3);
      wide[dim] += before + number(0, 9);
      return filled(torch::zeros(wide, values.options())
                        .narrow(static_cast<int64_t>(dim), before, sizes[dim]));
    }
    case 2: {  // two dimensions swapped in memory
      const int64_t a = number(0, values.dim() - 1), b = number(0, values.dim() - 1);
      return filled(torch::empty_like(values.transpose(a, b), torch::MemoryFormat::Contiguous)
                        .transpose(a, b));
    }
    default:
      return values;
  }
}

torch::Tensor Draw::labels(int64_t count, int64_t classes, int64_t ignored) {
  auto labels = torch::randint(classes, {count}, numbers_, torch::kLong);
  for (int64_t i = 1; i < count; ++i) {  // the first row always counts
    if (chance(0.15)) {
      labels[i] = ignored;
    }
  }
  return labels.to(device_);
}

torch::Tensor copy_with_layout(const torch::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  const auto size = tensor.storage().nbytes() / tensor.element_size();
  return torch::zeros({static_cast<int64_t>(size)}, tensor.options().requires_grad(false))
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset())
      .copy_(tensor);
}

double rounding_of(torch::Dtype dtype) {
  switch (dtype) {
    case torch::kDouble:
      return 1e-10;
    case torch::kFloat:
      return 5e-6;
    case torch::kHalf:
      return 1.5e-3;
    default:
      return 1e-2;
  }
}

double error_of(const torch::Tensor& a, const torch::Tensor& b, double floor) {
  const auto reference = b.detach().to(torch::kCPU, torch::kDouble);
  const auto difference = a.detach().to(torch::kCPU, torch::kDouble) - reference;
  const double least = floor * std::sqrt(static_cast<double>(reference.numel()));
  const double length = std::max(reference.norm().item<double>(), least);
  return length == 0 ? difference.norm().item<double>() : difference.norm().item<double>() / length;
}

namespace {

/// The outputs as one tensor: their gradients are then slices of one, at any offset.
Tensors joined(const Tensors& outputs) {
  Tensors flat;
  for (const auto& output : outputs) {
    flat.push_back(output.flatten().to(outputs[0].scalar_type()));
  }
  return {torch::cat(flat)};
}

struct Module : torch::nn::Module {
  explicit Module(const Case& one) : call(one.op) {
    for (std::size_t i = 0; i < one.inputs.size(); ++i) {
      if (one.is_parameter[i]) {
        register_parameter("p" + std::to_string(i), one.inputs[i]);
      }
    }
  }
  Tensors forward(const Tensors& inputs) { return call(inputs); }
  Case::Call call;
};

/// Results of one way to run a case.
struct Results {
  Tensors outputs, gradients;
  bool is_joined = false;  ///< in spite of the case's choice
};

class Runner {
 public:
  Runner(const Case& one, Draw& draw, double* worst) : case_(one), draw_(draw), worst_(worst) {
    joins_ = draw.chance(0.3);
    Tensors inputs;
    for (const auto& input : one.inputs) {
      inputs.push_back(input.detach().to(torch::kDouble).requires_grad_(true));
    }
    expected_.outputs = in_form(one.twin(inputs));
    const torch::NoGradGuard no_grad;
    const auto outputs = run(one.op, one.inputs);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      directions_.push_back(expected_.outputs[i].requires_grad()
                                ? draw.normal(outputs[i].sizes(), outputs[i].scalar_type())
                                : torch::Tensor());
    }
    backward(expected_.outputs);
    expected_.gradients = take_gradients(inputs);
  }

  std::string check() {
    for (const auto& mode : {"eager", "wrapped", "recomputed"}) {
      auto difference = compare(run(mode));
      if (!difference.empty()) {
        return std::string(mode) + (joins_ ? ", outputs joined" : "") + ": " + difference;
      }
    }
    return {};
  }

 private:
  Tensors in_form(const Tensors& outputs) const { return joins_ ? joined(outputs) : outputs; }

  Tensors run(const Case::Call& call, const Tensors& inputs) const {
    const ddp::Autocast autocast(case_.autocast ? ddp::AmpDtype::Bf16 : ddp::AmpDtype::Off);
    if (case_.draws) {
      torch::manual_seed(kMaskSeed);
    }
    return in_form(call(inputs));
  }

  /// Runs the case once in this mode; a wrapped case may accumulate twice.
  Results run(const std::string& mode) {
    passes_ = 1;
    Results results;
    if (mode == "wrapped") {
      run_wrapped(results);
    } else if (mode == "recomputed") {
      // checkpoint() has one output.
      results.is_joined = true;
      const auto body = [this](const Tensors& inputs) { return joined(case_.op(inputs))[0]; };
      results.outputs =
          run([&](const Tensors& inputs) { return Tensors{ddp::ops::checkpoint(body, inputs)}; },
              case_.inputs);
      const auto direction = in_one_piece();
      torch::autograd::backward({results.outputs[0]},
                                {direction.to(results.outputs[0].scalar_type())});
    } else {
      results.outputs = run(case_.op, case_.inputs);
      backward(results.outputs);
    }
    results.gradients = take_gradients(case_.inputs);
    return results;
  }

  void run_wrapped(Results& results) {
    if (std::none_of(case_.is_parameter.begin(), case_.is_parameter.end(),
                     [](bool is) { return is; })) {
      results.outputs = run(case_.op, case_.inputs);
      return backward(results.outputs);
    }
    ddp::DistributedDataParallel<std::shared_ptr<Module>> model(
        std::make_shared<Module>(case_), ddp::test::context().communicator());
    const auto forward = [&](const Tensors& inputs) { return model.forward(inputs); };
    if (draw_.chance(0.5)) {
      passes_ = 2;
      const auto no_sync = model.no_sync();
      backward(run(forward, case_.inputs));
    }
    results.outputs = run(forward, case_.inputs);
    backward(results.outputs);
  }

  void backward(const Tensors& outputs) const {
    Tensors with_gradient, directions;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (directions_[i].defined()) {
        with_gradient.push_back(outputs[i]);
        // A leaf's .grad may take the direction's memory, into which later backwards add.
        directions.push_back(copy_with_layout(directions_[i].to(outputs[i].scalar_type())));
      }
    }
    torch::autograd::backward(with_gradient, directions);
  }

  torch::Tensor in_one_piece() const {
    Tensors flat;
    for (std::size_t i = 0; i < directions_.size(); ++i) {
      const auto& output = expected_.outputs[i];
      flat.push_back(directions_[i].defined()
                         ? directions_[i].flatten().to(torch::kDouble)
                         : torch::zeros({output.numel()}, output.options().dtype(torch::kDouble)));
    }
    return torch::cat(flat);
  }

  static Tensors take_gradients(const Tensors& inputs) {
    Tensors gradients;
    for (auto input : inputs) {
      gradients.push_back(input.grad().defined() ? input.grad().detach().clone()
                                                 : torch::zeros_like(input));
      input.mutable_grad() = torch::Tensor();
    }
    return gradients;
  }

  std::string compare(const Results& results) {
    const auto outputs =
        results.is_joined && !joins_ ? joined(expected_.outputs) : expected_.outputs;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (auto text = compare("output", i, results.outputs[i], outputs[i]); !text.empty()) {
        return text;
      }
    }
    for (std::size_t i = 0; i < results.gradients.size(); ++i) {
      auto text = compare("gradient of input", i, results.gradients[i],
                          expected_.gradients[i] * static_cast<double>(passes_));
      if (!text.empty()) {
        return text;
      }
    }
    return {};
  }

  std::string compare(const char* what, std::size_t i, const torch::Tensor& got,
                      const torch::Tensor& wanted) {
    if (got.sizes() != wanted.sizes()) {
      std::ostringstream text;
      text << what << " " << i << " is " << got.sizes() << " for " << wanted.sizes();
      return text.str();
    }
    const double error = error_of(got, wanted, case_.floor);
    *worst_ = std::max(*worst_, error / case_.tolerance);
    if (error <= case_.tolerance) {
      return {};
    }
    std::ostringstream text;
    text << what << " " << i << " " << got.sizes() << " differs by " << error << ", more than "
         << case_.tolerance << "; its norm is " << got.to(torch::kDouble).norm().item<double>()
         << " for " << wanted.norm().item<double>();
    return text.str();
  }

  const Case& case_;
  Draw& draw_;
  double* worst_;
  bool joins_ = false;
  int64_t passes_ = 1;
  Tensors directions_;  // undefined where an output has no gradient
  Results expected_;
};

}  // namespace

std::string check(const Case& one, Draw& draw, double* worst) {
  return Runner(one, draw, worst).check();
}

}  // namespace differential
