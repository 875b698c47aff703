// SPDX-License-Identifier: Apache-2.0
// A small training run with every kind of state: batch norm, dropout, momentum or moments, masters,
// loss scale. Tests check that a resumed run gives the bits of an uninterrupted run.
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

#include "core/settings/setting_row.hpp"
#include "ddp/amp/amp.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "support/same_bits.hpp"

namespace testing {

enum class Precision { Fp32, Bf16Leaves, Fp16Scaled };

struct ResumeCase {
  Precision precision = Precision::Fp32;
  ddp::OptimizerType optimizer = ddp::OptimizerType::Sgd;
  int accumulate = 1;
};

inline torch::nn::Sequential make_module(Precision precision, at::Device device) {
  torch::manual_seed(5);
  torch::nn::Sequential module(torch::nn::Linear(6, 16), torch::nn::BatchNorm1d(16),
                               torch::nn::ReLU(), torch::nn::Dropout(0.25),
                               torch::nn::Linear(16, 4));
  module->to(device, precision == Precision::Bf16Leaves ? at::kBFloat16 : at::kFloat);
  return module;
}

inline ddp::OptimizerOptions optimizer_options(ddp::OptimizerType type) {
  ddp::OptimizerOptions options;
  options.type = type;
  options.weight_decay = 0.01;
  options.momentum = type == ddp::OptimizerType::Sgd ? 0.9 : 0.0;
  return options;
}

inline ddp::AmpOptions amp_options(Precision precision) {
  ddp::AmpOptions options;
  options.dtype = precision == Precision::Fp16Scaled ? ddp::AmpDtype::Fp16 : ddp::AmpDtype::Off;
  options.growth_interval = 3;  // low enough for the tracker to matter
  return options;
}

struct ResumeRun {
  ResumeRun(const ResumeCase& run_case, const ddp::CommunicatorPtr& communicator)
      : setup(run_case),
        model(make_module(run_case.precision, communicator->device()), communicator),
        optimizer(ddp::make_optimizer(model, optimizer_options(run_case.optimizer))),
        scaler(amp_options(run_case.precision)) {}

  at::Tensor micro_batch() {
    const auto dtype = setup.precision == Precision::Bf16Leaves ? at::kBFloat16 : at::kFloat;
    const auto device = model.communicator()->device();
    const auto input = torch::randn({8, 6}).to(device, dtype);
    const auto target = torch::randint(0, 4, {8}).to(device);
    ddp::Autocast autocast(amp_options(setup.precision).dtype);
    return torch::cross_entropy_loss(model.forward(input).to(at::kFloat), target);
  }

  void step() {
    optimizer->zero_grad();
    for (int micro = 0; micro + 1 < setup.accumulate; ++micro) {
      auto scope = model.no_sync();
      scaler.scale(micro_batch()).backward();
    }
    const auto loss = micro_batch();
    scaler.scale(loss).backward();
    scaler.unscale_(*optimizer);
    ddp::clip_grad_norm_(model, 1.0);
    scaler.step(*optimizer, 0.05);
    scaler.update();
    losses.push_back(loss.item<double>());
  }

  /// A checkpoint's contents for the objects, as tensors on the CPU and texts.
  std::map<std::string, at::Tensor> tensors() const {
    std::map<std::string, at::Tensor> all;
    for (const ddp::Stateful* object : objects()) {
      for (const auto& [key, tensor] : object->state_dict().tensors) {
        all[object->state_name() + "/" + key.text()] = tensor.detach().cpu().clone().contiguous();
      }
    }
    return all;
  }
  std::map<std::string, ddp::StateValue> values() const {
    std::map<std::string, ddp::StateValue> all;
    for (const ddp::Stateful* object : objects()) {
      for (const auto& [key, value] : object->state_dict().values) {
        all[object->state_name() + "/" + key] = value;
      }
    }
    return all;
  }
  std::vector<const ddp::Stateful*> objects() const { return {&model, optimizer.get(), &scaler}; }

  ResumeCase setup;
  ddp::DistributedDataParallel<torch::nn::Sequential> model;
  std::unique_ptr<ddp::Optimizer> optimizer;
  ddp::GradScaler scaler;
  std::vector<double> losses;
};

/// The first key whose tensors differ in any bit or in presence; empty if all are equal.
inline std::string first_difference(const std::map<std::string, at::Tensor>& a,
                                    const std::map<std::string, at::Tensor>& b) {
  for (const auto& [key, tensor] : a) {
    const auto other = b.find(key);
    if (other == b.end() || !same_bits(other->second, tensor)) {
      return key;
    }
  }
  return a.size() == b.size() ? "" : "another number of tensors";
}

}  // namespace testing
