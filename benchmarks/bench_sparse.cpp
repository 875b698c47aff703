// SPDX-License-Identifier: Apache-2.0
// See kUsage.
#include <torch/cuda.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/optim/sparse.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/command_line.hpp"

namespace {

constexpr char kUsage[] =
    R"(usage: bench_sparse [ROWS [STEPS]]      alone, or on several ranks (mpirun, torchrun, srun)

Milliseconds of one training step (zero_grad, forward, backward with its reductions, SGD step) of an
embedding [ROWS, 64] with 4,096 ids a rank, drawn uniformly. Sparse (ddp.sparse=gather) and dense
take turns in one process; a time is the median over STEPS (default 20) of the slowest rank. ROWS:
default 1000000. The program needs five times the table's memory: once for the sparse side, three
times for the dense side (weights, bucket, gradient), and once to compare the weights at the end.
)";
constexpr int64_t kDim = 64;
constexpr int64_t kIds = 4096;
constexpr int kWarmUp = 3;

class Side {
 public:
  Side(const ddp::Context& context, int64_t rows, bool sparse)
      : context_(context),
        // zeros() would leave the table's pages unmapped until their first step.
        table_(torch::nn::EmbeddingOptions(rows, kDim)
                   ._weight(torch::ones({rows, kDim}, context.device()))
                   .sparse(sparse)) {
    ddp::DdpOptions options;
    options.sparse = ddp::SparseGradients::Gather;
    model_ = std::make_unique<ddp::DistributedDataParallel<torch::nn::Embedding>>(
        table_, context.communicator(), options);
    optimizer_ = sparse ? ddp::make_sparse_optimizer(*model_, {.rule = ddp::SparseRule::Sgd})
                        : ddp::make_optimizer(*model_, {});
  }

  /// Milliseconds of a step on the slowest rank.
  double run(const torch::Tensor& ids) {
    synchronize();
    context_.communicator()->barrier();
    const auto begin = std::chrono::steady_clock::now();
    model_->zero_grad();
    model_->forward(ids).sum().backward();
    optimizer_->step(0.001);
    synchronize();
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - begin;
    auto slowest = at::tensor({elapsed.count()}, at::kDouble).to(context_.device());
    context_.communicator()->all_reduce(slowest, ddp::ReduceOp::Max)->wait();
    return slowest.item<double>();
  }
  const torch::Tensor& weight() const { return table_->weight; }

 private:
  void synchronize() const {
    if (context_.device().is_cuda()) {
      torch::cuda::synchronize();
    }
  }

  const ddp::Context& context_;
  torch::nn::Embedding table_;
  std::unique_ptr<ddp::DistributedDataParallel<torch::nn::Embedding>> model_;
  std::unique_ptr<ddp::Optimizer> optimizer_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void run(const ddp::Context& context, int64_t rows, int64_t steps) {
  Side sparse(context, rows, true);
  Side dense(context, rows, false);
  std::vector<double> sparse_ms, dense_ms;
  for (int64_t step = -kWarmUp; step < steps; ++step) {
    const auto ids = torch::randint(rows, {kIds}, torch::kLong).to(context.device());
    const double one = sparse.run(ids);
    const double other = dense.run(ids);
    if (step >= 0) {
      sparse_ms.push_back(one);
      dense_ms.push_back(other);
    }
  }
  // The mean of the ranks' gradients may be rounded once more on one of the sides.
  const double difference = (sparse.weight() - dense.weight()).detach().abs_().max().item<double>();
  if (context.is_main()) {
    std::printf("%s, %d ranks, %lld rows: sparse %.2f ms, dense %.2f ms, largest difference %.1e\n",
                context.communicator()->backend(), context.world_size(),
                static_cast<long long>(rows), median(sparse_ms), median(dense_ms), difference);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (ddp::answer_command_line(argc, argv, kUsage)) {
    return 0;
  }
  const int64_t rows = argc > 1 ? std::atoll(argv[1]) : 1000000;
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 20;
  if (rows < 1 || steps < 1) {
    std::fputs(kUsage, stderr);
    return static_cast<int>(ddp::ExitCode::Settings);
  }
  try {
    run(ddp::Context::create(), rows, steps);
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "bench_sparse: %s\n", error.what());
    return static_cast<int>(error.exit_code());
  }
  return 0;
}
