// SPDX-License-Identifier: Apache-2.0
#include "modes.hpp"

namespace selftest {
namespace {

using ddp::exact::Mlp;
using torch::Tensor;

/// Batches of `num_rows(rank)` rows of all ranks, in one.
Tensor rows_of_all(const ddp::Context& context, int64_t part,
                   const std::function<int64_t(int)>& num_rows) {
  std::vector<Tensor> rows;
  for (int rank = 0; rank < context.world_size(); ++rank) {
    rows.push_back(rows_of(context, rank, part, num_rows(rank)));
  }
  return torch::cat(rows);
}

/// The mean over the ranks of the sums over their rows.
Tensor mean_loss(const ddp::Context& context, Mlp& plain, int64_t part) {
  const auto rows = rows_of_all(context, part, [](int) { return 4; });
  return plain->forward(rows).sum() / context.world_size();
}

Mode make_mode(const ddp::Context& context, std::string name, std::string says) {
  Mode mode{.name = std::move(name), .says = std::move(says)};
  mode.backward = [&context](Model& model, int64_t step) {
    model.forward(rows_of(context, context.rank(), step)).sum().backward();
  };
  mode.loss = [&context](Mlp& plain, int64_t step) { return mean_loss(context, plain, step); };
  return mode;
}

Mode accumulation(const ddp::Context& context) {
  auto mode = make_mode(context, "accumulation", "two batches under no_sync() and one with it");
  mode.backward = [&context](Model& model, int64_t step) {
    const auto add = [&](int64_t micro) {
      model.forward(rows_of(context, context.rank(), 3 * step + micro)).sum().backward();
    };
    {
      const auto guard = model.no_sync();
      add(0);
      add(1);
    }
    add(2);
  };
  mode.loss = [&context](Mlp& plain, int64_t step) {
    return mean_loss(context, plain, 3 * step) + mean_loss(context, plain, 3 * step + 1) +
           mean_loss(context, plain, 3 * step + 2);
  };
  return mode;
}

Mode unused(const ddp::Context& context) {
  auto mode = make_mode(context, "unused", "find_unused_parameters: ranks skip a layer in turn");
  mode.ddp.find_unused_parameters = true;
  const auto skips = [](int rank, int64_t step) { return step % 4 == 3 || (rank + step) % 2 == 1; };
  mode.backward = [&context, skips](Model& model, int64_t step) {
    const int rank = context.rank();
    model.forward(rows_of(context, rank, step), skips(rank, step)).sum().backward();
  };
  mode.loss = [&context, skips](Mlp& plain, int64_t step) {
    auto sum = torch::zeros({}, context.device());
    for (int rank = 0; rank < context.world_size(); ++rank) {
      sum = sum + plain->forward(rows_of(context, rank, step), skips(rank, step)).sum();
    }
    return sum / context.world_size();
  };
  return mode;
}

/// Batches of `num_rows(rank, step)` rows, each row of equal weight.
Mode weighted(const ddp::Context& context, std::string name, std::string says,
              const std::function<int64_t(int, int64_t)>& num_rows) {
  auto mode = make_mode(context, std::move(name), std::move(says));
  mode.backward = [&context, num_rows](Model& model, int64_t step) {
    const auto count = num_rows(context.rank(), step);
    const auto rows = rows_of(context, context.rank(), step, count);
    model.weighted_backward(model.forward(rows).sum(), static_cast<double>(count));
  };
  mode.loss = [&context, num_rows](Mlp& plain, int64_t step) {
    const auto rows = rows_of_all(context, step, [&](int rank) { return num_rows(rank, step); });
    return plain->forward(rows).sum() / rows.size(0);
  };
  return mode;
}

Mode bf16(const ddp::Context& context) {
  auto mode = make_mode(context, "bf16", "parameters and gradients in bf16");
  mode.dtype = torch::kBFloat16;
  mode.ddp.fp32_grads = false;
  mode.tolerance = 0.03;  // a few roundings to 8 bits; one of 32 ranks changes 4.7 %
  mode.backward = [&context](Model& model, int64_t step) {
    const auto rows = rows_of(context, context.rank(), step).to(torch::kBFloat16);
    model.forward(rows).sum().backward();
  };
  return mode;
}

}  // namespace

Tensor rows_of(const ddp::Context& context, int rank, int64_t part, int64_t num_rows) {
  return ddp::exact::integers({num_rows, 4}, 1000 * (part + 1) + rank).to(context.device());
}

int64_t num_batches_of(int rank) {
  return rank % 2 == 1 ? kNumSteps - 2 : kNumSteps;
}

std::vector<Mode> make_modes(const ddp::Context& context) {
  const double smallest_mb = 1.0 / (1 << 20);
  std::vector<Mode> modes;
  const auto add = [&modes](Mode mode) -> Mode& { return modes.emplace_back(std::move(mode)); };
  add(make_mode(context, "plain", "all gradients in one bucket"));
  add(make_mode(context, "buckets", "a bucket for each gradient")).ddp.bucket_cap_mb = smallest_mb;
  add(make_mode(context, "large", "a gradient of 4 MB")).width = 1024;
  add(accumulation(context));
  add(unused(context));
  // With 2, 4, … ranks the numbers of rows are powers of two in sum, so that the mean is exact.
  const bool is_alone = context.world_size() == 1;
  add(weighted(context, "weighted", "weighted_backward: half of the ranks have an empty batch",
               [is_alone](int rank, int64_t) { return is_alone || rank % 2 == 1 ? 4 : 0; }));
  add(weighted(context, "uneven", "join: half of the ranks run out of batches first",
               [](int rank, int64_t step) { return step < num_batches_of(rank) ? 4 : 0; }))
      .is_uneven = true;
  add(bf16(context));
  auto& zero1 = add(make_mode(context, "zero1", "optimizer.zero1, parameters only"));
  zero1.zero1 = true;
  zero1.ddp.bucket_cap_mb = smallest_mb;
  add(make_mode(context, "captured", "the step as a CUDA graph")).is_captured = true;
  return modes;
}

}  // namespace selftest
