// SPDX-License-Identifier: Apache-2.0
// exported_case FOLDER [TOLERANCE]: trains FOLDER/model.pt2 as reference.py trained the model in
// Python, and compares outputs, losses, gradients, parameters and buffers with
// FOLDER/case.safetensors: bit by bit, or with a tolerance for a reference of another machine.
// Without a tolerance it also writes FOLDER/trained.safetensors and FOLDER/trained.pt2.
#include <torch/torch.h>
#ifdef DDP_HAS_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/train/weights.hpp"
#include "export/training_case.hpp"
#include "support/same_bits.hpp"

using namespace export_test;

namespace {

// The memory of this process or of the GPU, in bytes, now and at most since reset().
struct MemoryPeak {
  static int64_t status(const std::string& key) {
    std::ifstream file("/proc/self/status");
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with(key)) {
        return std::strtoll(line.c_str() + key.size() + 1, nullptr, 10) * 1024;
      }
    }
    return 0;
  }
  void reset() {
#ifdef DDP_HAS_CUDA
    if (chosen_device().is_cuda()) {
      c10::cuda::CUDACachingAllocator::resetPeakStats(0);
      before = c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current;
      return;
    }
#endif
    std::ofstream("/proc/self/clear_refs") << "5";
    before = status("VmRSS");
  }
  double mib() const {
#ifdef DDP_HAS_CUDA
    if (chosen_device().is_cuda()) {
      const auto peak = c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].peak;
      return static_cast<double>(peak - before) / 1048576;
    }
#endif
    return static_cast<double>(status("VmHWM") - before) / 1048576;
  }
  int64_t before = 0;
};

double processor_ms() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

class Case : private TrainingCase {
 public:
  Case(const std::string& folder, double tolerance)
      : TrainingCase(folder), folder_(folder), tolerance_(tolerance) {}

  int run() {
    torch::manual_seed(1);
    const auto num_steps = tensors.at("losses").numel();
    std::vector<double> milliseconds;
    peak_.reset();
    for (int64_t step = 0; step < num_steps; ++step) {
      start_ = processor_ms();
      train_step(step);
      milliseconds.push_back(processor_ms() - start_);
    }
    if (tolerance_ == 0) {
      ddp::save_weights(*module, folder_ + "/trained.safetensors");
      module->save_archive(folder_ + "/trained.pt2");
    }
    for (const auto& [name, tensor] : ddp::named_weights(*module)) {
      compare("after." + name, tensor);
    }
    if (tensors.count("eval.00") != 0) {
      module->eval();
      torch::NoGradGuard no_grad;
      compare_leaves("eval.", call(*module, batch(0)));
    }
    std::sort(milliseconds.begin(), milliseconds.end());
    std::cout << num_equal_ << " equal, " << num_different_ << " different; step "
              << milliseconds[milliseconds.size() / 2] << " ms, peak " << peak_mib_ << " MiB; "
              << compare_losses(losses_) << "\n";
    return num_different_ == 0 && num_equal_ > 0 ? 0 : 1;
  }

 private:
  void train_step(int64_t step) {
    const auto output = call(*module, batch(step));
    std::vector<at::Tensor> leaves;
    append_leaves(output, leaves);
    const auto loss = loss_of(leaves);
    loss.backward();
    if (step == 0) {
      peak_mib_ = peak_.mib();
      compare_leaves("output.", output);
      for (const auto& item : module->named_parameters()) {
        if (item.value().grad().defined()) {
          compare("grad." + item.key(), item.value().grad());
        }
      }
      start_ = processor_ms();
    }
    losses_.push_back(loss.detach().to(at::kFloat));
    compare(ddp::concat("loss ", step), losses_.back(), tensors.at("losses")[step]);
    torch::NoGradGuard no_grad;
    for (auto& parameter : module->parameters()) {
      if (parameter.grad().defined()) {
        parameter.add_(parameter.grad(), -learning_rate);
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
    const auto found = tensors.find(name);
    if (found == tensors.end()) {
      std::cout << name << " is not among Python's\n";
      ++num_different_;
      return;
    }
    compare(name, value, found->second);
  }

  void compare(const std::string& name, const at::Tensor& on_device, const at::Tensor& expected) {
    const auto value = on_device.cpu();
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

  std::string folder_;
  double tolerance_;
  std::vector<at::Tensor> losses_;
  int num_equal_ = 0, num_different_ = 0;
  MemoryPeak peak_;
  double peak_mib_ = 0, start_ = 0;
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
