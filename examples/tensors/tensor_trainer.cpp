// SPDX-License-Identifier: Apache-2.0
#include "tensors/tensor_trainer.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "tensors/model_call.hpp"
#include "tensors/tensor_task.hpp"

namespace examples {
namespace {

using Forward = TensorForwards::Forward;

/// 1 / (targets in the largest rank's step), rounded to a power of two.
double target_weight(const ddp::Config& cfg, const TargetFacts& facts, const ddp::Context& ctx) {
  const int64_t global = cfg.loader.global_batch_size;
  const int64_t rows =
      global > 0 ? (global + ctx.world_size() - 1) / ctx.world_size() : cfg.loader.batch_size;
  const auto targets = static_cast<double>(
      std::max<int64_t>(1, rows * facts.num_per_sample * cfg.train.grad_accum_steps));
  return std::exp2(-std::round(std::log2(targets)));
}

c10::IValue call_program(const Forward& forward,
                         const std::map<std::string, c10::IValue>& arguments) {
  try {
    return forward(arguments);
  } catch (const ddp::MissingArgumentError& error) {
    throw with_target_hint(error);
  } catch (const c10::IndexError& error) {  // an embedding on the CPU
    throw ddp::DataError(ddp::concat(
        "the program does not take an index of the data: ", error.what_without_backtrace(),
        "; fix: export a model for all values of tensors.path"));
  }
}

void check_program(const TensorForwards& forwards,
                   const std::map<std::string, c10::IValue>& arguments) {
  call_program(
      [&](const auto& all) {
        forwards.check(all);
        return c10::IValue();
      },
      arguments);
}

TensorRows first_rows(const TensorRowsDataset& data, int64_t size) {
  std::vector<int64_t> indices(static_cast<std::size_t>(size));
  std::iota(indices.begin(), indices.end(), 0);
  return data.get_batch(indices);
}

// A program that fails on the first rows does not fit the data.
void rehearse_data(const std::function<void()>& evaluate) {
  try {
    evaluate();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    throw ddp::DataError(ddp::concat(
        "the program does not take the data of tensors.path: ", error.what_without_backtrace(),
        "; fix: write tensors of the dtypes of the export"));
  }
}

}  // namespace

SampleRun train_tensors(ddp::Context& ctx, ddp::Config cfg, const TensorData& data,
                        const SampleModel& wrapped, const TensorForwards& forwards) {
  ddp::DistributedSampler sampler(data.train->size(), ctx.communicator(), cfg.sampler);
  TensorLoader train_loader(data.train, sampler, ctx.device(), cfg.loader);
  ddp::DistributedSampler eval_sampler(data.eval->size(), ctx.communicator(),
                                       ddp::eval_sampler_options(cfg.sampler));
  TensorLoader eval_loader(data.eval, eval_sampler, ctx.device(), eval_loader_options(cfg));

  const auto dtype = wrapped.module.parameters().front().scalar_type();
  const bool has_target = data.loss != LossKind::InGraph;
  const auto arguments_of = [&](const TensorRows& rows) {
    std::map<std::string, c10::IValue> arguments;
    for (std::size_t i = 0; i + (has_target ? 1 : 0) < rows.tensors.size(); ++i) {
      arguments.emplace(data.names[i], as_input(rows.tensors[i], dtype));
    }
    return arguments;
  };
  const auto loss_by = [&](const Forward& forward, const TensorRows& rows,
                           bool is_training) -> ddp::ops::CrossEntropyResult {
    const auto& tensors = rows.tensors;
    const auto outputs = call_program(forward, arguments_of(rows));
    if (!has_target) {
      return {.loss = loss_in_graph(outputs, forwards.output), .num_correct = {}};
    }
    return sample_loss(data.loss, select_output(outputs, forwards.output), tensors.back(),
                       data.facts, is_training ? cfg.train.label_smoothing : 0);
  };
  rehearse_evaluation(ctx, cfg, wrapped.module, data.eval->size(), [&](int64_t size) {
    auto rows = first_rows(*data.eval, size);
    for (auto& tensor : rows.tensors) {
      tensor = tensor.to(ctx.device());
    }
    rehearse_data([&] { loss_by(forwards.module, rows, /*is_training=*/false); });
  });
  if (forwards.check) {
    check_training_batches(ctx, cfg, data.train->size(), [&](int64_t size) {
      check_program(forwards, arguments_of(first_rows(*data.train, size)));
    });
  }
  const auto loss = [&](const TensorRows& rows, bool is_training) {
    return loss_by(forwards.wrapper, rows, is_training);
  };
  TensorTask task({.loss = loss, .train_loader = train_loader, .eval_loader = eval_loader},
                  {.has_ignored = data.facts.has_ignored,
                   .weighted = has_uneven_batches(cfg, ctx),
                   .target_weight = target_weight(cfg, data.facts, ctx)});
  return train_samples(ctx, std::move(cfg), wrapped, train_loader, task);
}

}  // namespace examples
