// SPDX-License-Identifier: Apache-2.0
// exported_case FOLDER: trains FOLDER/model.pt2 as reference.py trained the model in Python, and
// compares outputs, losses, gradients, parameters and buffers with FOLDER/case.safetensors bit by
// bit.
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/safetensors.hpp"
#include "ddp/export/exported_module.hpp"
#include "ddp/train/weights.hpp"
#include "support/same_bits.hpp"

namespace {

constexpr double kLearningRate = 0.01;

void append_leaves(const c10::IValue& value, std::vector<at::Tensor>& leaves) {
  if (value.isTensor()) {
    leaves.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) {
      append_leaves(element, leaves);
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      append_leaves(element, leaves);
    }
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      append_leaves(entry.value(), leaves);
    }
  }
}

// The sum of the mean squares of all outputs that have a gradient.
at::Tensor loss_of(const std::vector<at::Tensor>& leaves) {
  at::Tensor loss;
  for (const auto& leaf : leaves) {
    if (leaf.requires_grad()) {
      const auto part = leaf.dim() == 0 ? leaf : leaf.square().mean();
      loss = loss.defined() ? loss + part : part;
    }
  }
  return loss;
}

// KiB of this process, now ("VmRSS") or at most since reset_peak() ("VmHWM").
int64_t resident(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key)) {
      return std::strtoll(line.c_str() + key.size() + 1, nullptr, 10);
    }
  }
  return 0;
}

void reset_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

double processor_ms() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

class Case {
 public:
  Case(const std::string& folder, double tolerance)
      : tolerance_(tolerance),
        module_(folder + "/model.pt2"),
        tensors_(ddp::load_safetensors(folder + "/case.safetensors").tensors) {
    for (const auto& [name, tensor] : tensors_) {
      if (name.starts_with("input.")) {
        inputs_.emplace_back(tensor.clone());  // names are in order
      } else if (name.starts_with("keyword.")) {
        keywords_.emplace(name.substr(8), tensor.clone());
      }
    }
  }

  int run() {
    torch::manual_seed(1);
    const auto num_steps = tensors_.at("losses").numel();
    std::vector<double> milliseconds;
    reset_peak();
    before_ = resident("VmRSS");
    for (int64_t step = 0; step < num_steps; ++step) {
      start_ = processor_ms();
      train_step(step);
      milliseconds.push_back(processor_ms() - start_);
    }
    for (const auto& [name, tensor] : ddp::named_weights(*module_)) {
      compare("after." + name, tensor);
    }
    if (tensors_.count("eval.00") != 0) {
      module_->eval();
      torch::NoGradGuard no_grad;
      compare_leaves("eval.", module_->call(inputs_, keywords_));
    }
    std::sort(milliseconds.begin(), milliseconds.end());
    std::cout << num_equal_ << " equal, " << num_different_ << " different; step "
              << milliseconds[milliseconds.size() / 2] << " ms, peak "
              << static_cast<double>(peak_) / 1024 << " MiB\n";
    return num_different_ == 0 && num_equal_ > 0 ? 0 : 1;
  }

 private:
  void train_step(int64_t step) {
    const auto output = module_->call(inputs_, keywords_);
    std::vector<at::Tensor> leaves;
    append_leaves(output, leaves);
    const auto loss = loss_of(leaves);
    loss.backward();
    if (step == 0) {
      peak_ = resident("VmHWM") - before_;
      compare_leaves("output.", output);
      for (const auto& item : module_->named_parameters()) {
        if (item.value().grad().defined()) {
          compare("grad." + item.key(), item.value().grad());
        }
      }
      start_ = processor_ms();
    }
    compare(ddp::concat("loss ", step), loss.detach().to(at::kFloat), tensors_.at("losses")[step]);
    torch::NoGradGuard no_grad;
    for (auto& parameter : module_->parameters()) {
      if (parameter.grad().defined()) {
        parameter.add_(parameter.grad(), -kLearningRate);
        parameter.mutable_grad().reset();
      }
    }
  }

  void compare_leaves(const std::string& prefix, const c10::IValue& value) {
    std::vector<at::Tensor> leaves;
    append_leaves(value, leaves);
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      compare(ddp::concat(prefix, i < 10 ? "0" : "", i), leaves[i].detach());
    }
  }

  void compare(const std::string& name, const at::Tensor& value) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) {
      std::cout << name << " is not among Python's\n";
      ++num_different_;
      return;
    }
    compare(name, value, found->second);
  }

  void compare(const std::string& name, const at::Tensor& value, const at::Tensor& expected) {
    const bool is_equal =
        tolerance_ == 0
            ? testing::same_bits(value, expected)
            : value.sizes() == expected.sizes() && value.dtype() == expected.dtype() &&
                  at::allclose(value, expected, tolerance_, tolerance_, /*equal_nan=*/true);
    ++(is_equal ? num_equal_ : num_different_);
    if (!is_equal) {
      std::cout << name << " differs";
      if (value.sizes() == expected.sizes() && value.numel() > 0) {
        std::cout << " by up to "
                  << (value.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
      }
      std::cout << ": " << value.sizes() << ' ' << value.dtype() << ", in Python "
                << expected.sizes() << ' ' << expected.dtype() << '\n';
    }
  }

  double tolerance_;
  ddp::ExportedModule module_;
  ddp::TensorMap tensors_;
  std::vector<c10::IValue> inputs_;
  std::map<std::string, c10::IValue> keywords_;
  int num_equal_ = 0, num_different_ = 0;
  int64_t before_ = 0, peak_ = 0;  // KiB
  double start_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::cerr << "usage: exported_case FOLDER [TOLERANCE]\n";
    return 64;
  }
  at::set_num_threads(1);
  try {
    return Case(argv[1], argc == 3 ? std::strtod(argv[2], nullptr) : 0).run();
  } catch (const ddp::Error& error) {
    std::cout << "error " << static_cast<int>(error.exit_code()) << ": " << error.what() << '\n';
  } catch (const std::exception& error) {
    std::cout << "error: " << error.what() << '\n';
  }
  return 2;
}
