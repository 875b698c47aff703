// SPDX-License-Identifier: Apache-2.0
// A small network with every part a training step may have, trained eagerly or as a graph.
#pragma once

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <time.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "ddp/amp/amp.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/optim/ema.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/train/graphed_step.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "gpu/has_ranks.hpp"

namespace ddp::test {

inline bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    using namespace torch::nn;
    conv1 = register_module("conv1", Conv2d(Conv2dOptions(3, 16, 3).padding(1).bias(false)));
    norm = register_module("norm", BatchNorm2d(16));
    conv2 = register_module("conv2", Conv2d(Conv2dOptions(16, 32, 3).stride(2).padding(1)));
    dropout = register_module("dropout", Dropout(0.3));
    fc = register_module("fc", Linear(32, 10));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = torch::relu(norm(conv1(x)));
    y = torch::relu(conv2(y)).mean({2, 3});
    return fc(dropout(y));
  }
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Net);

struct Setup {
  std::string name;
  AmpOptions amp = {};
  OptimizerOptions optimizer = {};
  double max_grad_norm = 0;
  int64_t partial_every = 0;  ///< the batch is smaller every so many steps
  int64_t micro_batches = 1;
  bool weighted = false;
  bool ema = false;
  bool zeroes_outside = false;  ///< gradients are zeroed before the call, not in it
  int64_t refuse_host_waits_after = -1;
  int64_t replay_check_every = 0;
  std::function<void(const at::Tensor& loss)> before_backward = {};
  std::function<void(const at::Tensor& loss)> after_step = {};
};

inline Batch image_batch(int64_t step, int64_t size) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step * 64 + rank() + 1));
  const auto data = torch::randn({size, 3, 12, 12}, generator);
  const auto target = torch::randint(0, 10, {size}, generator, torch::kLong);
  return {data.to(context().device()), target.to(context().device())};
}

/// A training step and its parts.
class Trainer {
 public:
  Trainer(const Setup& setup, CudaGraph mode) : setup_(setup) {
    at::globalContext().setDeterministicCuDNN(true);
    at::globalContext().setBenchmarkCuDNN(false);
    torch::manual_seed(5);
    module_ = Net();
    module_->to(context().device());
    // Small buckets give several reductions per step.
    model_.emplace(module_, group(), with_cap(0.005));
    optimizer_ = make_optimizer(*model_, setup_.optimizer);
    scaler_.emplace(setup_.amp);
    if (setup_.ema) {
      ema_.emplace(*model_, EmaOptions{.decay = 0.9});
    }
    torch::manual_seed(static_cast<uint64_t>(11 + rank()));
    step_.emplace(
        context(),
        GraphedParts{.models = {&*model_}, .optimizers = {optimizer_.get()}, .scaler = &*scaler_},
        [this](const std::vector<Batch>& batches, const StepScalars& scalars) {
          return run(batches, scalars);
        },
        GraphedStepOptions{.mode = mode, .replay_check_every = setup_.replay_check_every});
  }

  StepResult<std::vector<at::Tensor>> step(const std::vector<Batch>& batches, int64_t i) {
    if (setup_.zeroes_outside) {
      model_->zero_grad();
    }
    return (*step_)(batches, {.lr = 0.05 / static_cast<double>(1 + i % 5), .step = i});
  }

  std::vector<Batch> batches(int64_t i) const {
    const bool partial = setup_.partial_every > 0 && (i + 1) % setup_.partial_every == 0;
    std::vector<Batch> result;
    for (int64_t micro = 0; micro < setup_.micro_batches; ++micro) {
      result.push_back(image_batch(i * setup_.micro_batches + micro, partial ? 5 : 8));
    }
    return result;
  }

  /// Everything that training changes.
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all;
    for (const auto& parameter : module_->parameters()) {
      all.push_back(parameter.detach().clone());
      all.push_back(parameter.grad().clone());
    }
    for (const auto& buffer : module_->buffers()) {
      all.push_back(buffer.clone());
    }
    for (const auto& [name, tensor] : optimizer_->state_dict().tensors) {
      all.push_back(tensor.clone());
    }
    if (ema_) {
      for (const auto& average : ema_->averages()) {
        all.push_back(average.tensor.clone());
      }
    }
    all.push_back(torch::rand({4}, on_device()));  // shows the generator's state
    return all;
  }

  GraphedStepCounts counts() const { return step_->counts(); }
  GradScaler& scaler() { return *scaler_; }
  double loss_scale() const { return scaler_->get_scale(); }

 private:
  std::vector<at::Tensor> run(const std::vector<Batch>& batches, const StepScalars& scalars) {
    if (!setup_.zeroes_outside) {
      model_->zero_grad();
    }
    at::Tensor sum;
    for (size_t micro = 0; micro < batches.size(); ++micro) {
      std::optional<NoSync> no_sync;
      if (micro + 1 < batches.size()) {
        no_sync.emplace(*model_);
      }
      at::Tensor loss;
      {
        const Autocast autocast(setup_.amp);
        loss =
            torch::cross_entropy_loss(model_->forward(batches[micro].data), batches[micro].target);
      }
      if (setup_.before_backward) {
        setup_.before_backward(loss);
      }
      if (setup_.weighted) {
        model_->weighted_backward(scaler_->scale(loss * 0.5), 0.5);
      } else {
        scaler_->scale(loss).backward();
      }
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
    }
    scaler_->unscale_(*optimizer_);
    const auto norm = clip_grad_norm_(*model_, setup_.max_grad_norm);
    scaler_->step(*optimizer_, scalars);
    scaler_->update();
    if (ema_) {
      ema_->update();
    }
    if (setup_.after_step) {
      setup_.after_step(sum);
    }
    return {sum, norm};
  }

  const Setup setup_;
  Net module_{nullptr};
  std::optional<DistributedDataParallel<Net>> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::optional<GradScaler> scaler_;
  std::optional<Ema> ema_;
  std::optional<GraphedStep<std::vector<Batch>, std::vector<at::Tensor>>> step_;
};

struct Trained {
  std::vector<double> log;  ///< loss and norm of each step; NaN and infinity as their bits' numbers
  std::vector<at::Tensor> tensors;
  GraphedStepCounts counts;
  double loss_scale = 1;
};

inline Trained train(const Setup& setup, CudaGraph mode, int64_t num_steps) {
  Trainer trainer(setup, mode);
  Trained trained;
  std::vector<StepLog> logs;
  const auto read_oldest = [&] {
    for (int k = 0; k < logs.front().size(); ++k) {
      const double value = logs.front()[k];
      trained.log.push_back(std::isfinite(value) ? value : 1e300);
    }
    logs.erase(logs.begin());
  };
  for (int64_t i = 0; i < num_steps; ++i) {
    const auto batches = trainer.batches(i);
    if (i == setup.refuse_host_waits_after) {
      c10::cuda::device_synchronize();
    }
    if (setup.refuse_host_waits_after >= 0 && i >= setup.refuse_host_waits_after) {
      c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
    }
    logs.push_back(trainer.step(batches, i).log);
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
    if (logs.size() > 8) {  // reads after a few more steps, like a training loop
      read_oldest();
    }
  }
  while (!logs.empty()) {
    read_oldest();
  }
  trained.tensors = trainer.tensors();
  trained.counts = trainer.counts();
  trained.loss_scale = trainer.loss_scale();
  return trained;
}

/// Prints the CPU time and the wall time of one call while the GPU lags behind.
inline void bench_host_time(const Setup& setup) {
  const auto cpu_us = [] {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
  };
  for (const auto mode : {CudaGraph::Off, CudaGraph::On}) {
    Trainer trainer(setup, mode);
    const auto batches = trainer.batches(0);
    for (int64_t i = 0; i < 20; ++i) {
      trainer.step(batches, i);
    }
    c10::cuda::device_synchronize();
    constexpr int kRounds = 20;
    constexpr int kCalls = 40;  // fewer than a host may be ahead
    std::vector<double> cpu, wall, total;
    for (int round = 0; round < kRounds; ++round) {
      const auto start = std::chrono::steady_clock::now();
      const double begin = cpu_us();
      for (int64_t i = 0; i < kCalls; ++i) {
        trainer.step(batches, i);
      }
      cpu.push_back((cpu_us() - begin) / kCalls);
      const auto us = [&] {
        return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
                   .count() /
               kCalls;
      };
      wall.push_back(us());
      c10::cuda::device_synchronize();
      total.push_back(us());
    }
    const auto median = [](std::vector<double> values) {
      std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
      return values[values.size() / 2];
    };
    std::cout << (mode == CudaGraph::Off ? "eager" : "graph") << ": host " << median(cpu)
              << " us CPU, " << median(wall) << " us wall a call; step with the GPU's end "
              << median(total) << " us\n";
  }
}

}  // namespace ddp::test
