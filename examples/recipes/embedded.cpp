// SPDX-License-Identifier: Apache-2.0
// libddp as a library inside a program that owns MPI: a simulation trains a model on its own data.
//
//   mpirun -n 3 build/examples/recipes/embedded
#include <mpi.h>
#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ddp/ddp.hpp"

// The header for the simulation, in C or in Fortran (bind(c)). Each function returns 0 or an exit
// code of libddp, and surrogate_error() has the text.
extern "C" {
struct Surrogate;
// Collective over MPI_COMM_WORLD. `trains` 0: this rank only takes part in create and destroy.
int surrogate_create(int trains, Surrogate** result);
// Collective over the ranks that train. `inputs` [rows, 3] and `targets` [rows] are read in the
// call. `rows` may be 0. `loss` is the mean over the rows of all ranks.
int surrogate_step(Surrogate* surrogate, const double* inputs, const double* targets, int64_t rows,
                   double* loss);
// Collective over MPI_COMM_WORLD, before MPI_Finalize.
int surrogate_destroy(Surrogate** surrogate);
const char* surrogate_error(void);
}

struct Surrogate {
  ddp::Context context;
  ddp::CommunicatorPtr group;  // of the ranks that train; null on the others
  std::optional<ddp::DistributedDataParallel<torch::nn::Sequential>> model;
  std::unique_ptr<ddp::Optimizer> optimizer;
  int64_t step = 0;
};

namespace {

constexpr int64_t kInputs = 3;
thread_local std::string last_error;

// No exception may enter C or Fortran.
template <typename Work>
int guarded(const Work& work) noexcept {
  try {
    work();
    return 0;
  } catch (const ddp::Error& error) {
    last_error = error.what();
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "an exception of an unknown type";
  }
  return static_cast<int>(ddp::ExitCode::UserException);
}

// Shows the simulation's memory as a tensor, without a copy.
torch::Tensor view_of(const double* data, at::IntArrayRef shape) {
  return torch::from_blob(const_cast<double*>(data), shape, torch::kDouble);
}

}  // namespace

extern "C" {

int surrogate_create(int trains, Surrogate** result) {
  return guarded([&] {
    ddp::ContextOptions options;
    options.device = ddp::DeviceChoice::Cpu;
    auto context = ddp::Context::create(options);
    auto group = context.communicator()->split(trains != 0 ? 0 : -1, context.rank());
    auto surrogate =
        std::make_unique<Surrogate>(Surrogate{std::move(context), std::move(group), {}, {}});
    if (surrogate->group) {
      torch::nn::Sequential module(torch::nn::Linear(kInputs, 16), torch::nn::Tanh(),
                                   torch::nn::Linear(16, 1));
      module->to(torch::kDouble);
      surrogate->model.emplace(module, surrogate->group);
      surrogate->optimizer = ddp::make_optimizer(*surrogate->model, ddp::OptimizerOptions{});
    }
    *result = surrogate.release();
  });
}

int surrogate_step(Surrogate* surrogate, const double* inputs, const double* targets, int64_t rows,
                   double* loss) {
  return guarded([&] {
    auto& model = *surrogate->model;
    surrogate->context.set_progress(surrogate->step++, "training");  // for messages of failures
    model.zero_grad();
    const auto outputs = model.forward(view_of(inputs, {rows, kInputs})).squeeze(1);
    const auto loss_sum = torch::mse_loss(outputs, view_of(targets, {rows}), at::Reduction::Sum);
    const auto count = static_cast<double>(rows);
    model.weighted_backward(loss_sum, count);  // divides by the rows of all ranks
    surrogate->optimizer->step(0.1);
    const auto total = torch::stack({loss_sum.detach(), torch::tensor(count, torch::kDouble)});
    surrogate->group->all_reduce(total)->wait();
    *loss = (total[0] / total[1]).item<double>();
  });
}

int surrogate_destroy(Surrogate** surrogate) {
  return guarded([&] {
    const std::unique_ptr<Surrogate> owned(std::exchange(*surrogate, nullptr));
    if (owned) {
      owned->optimizer.reset();
      owned->model.reset();
      owned->group.reset();
      owned->context.close();  // throws, where the destructor only logs
    }
  });
}

const char* surrogate_error(void) {
  return last_error.c_str();
}
}

// The simulation. Nothing below knows libddp.
namespace {

constexpr int kRows = 25;

int fail(const char* what, int code) {
  std::fprintf(stderr, "%s: code %d: %s\n", what, code, surrogate_error());
  return code;
}

int simulate(int rank, int num_ranks) {
  // Rank 0 writes files; the others train. One rank alone does both.
  const int first = num_ranks > 1 ? 1 : 0;
  const int num_training = num_ranks - first;
  const bool trains = rank >= first;
  Surrogate* surrogate = nullptr;
  if (const int code = surrogate_create(trains ? 1 : 0, &surrogate); code != 0) {
    return fail("create", code);
  }
  const int begin = trains ? kRows * (rank - first) / num_training : 0;
  const int end = trains ? kRows * (rank - first + 1) / num_training : 0;
  std::array<double, 3 * kRows> inputs{};
  std::array<double, kRows> targets{};
  double loss = 0;
  for (int step = 0; trains && step < 200; ++step) {
    for (int row = begin; row < end; ++row) {
      double* x = &inputs[3 * (row - begin)];
      for (int i = 0; i < 3; ++i) {
        x[i] = (kRows * step + row) * 7 % (11 + 2 * i) / 8.0 - 0.5;
      }
      targets[row - begin] = x[0] * x[1] - 0.3 * x[2];
    }
    const int code = surrogate_step(surrogate, inputs.data(), targets.data(), end - begin, &loss);
    if (code != 0) {
      return fail("step", code);
    }
  }
  // Rank 0 may be here long before the others. libddp's own waits have a limit, by default of ten
  // minutes (ControlPlaneOptions::collective_timeout).
  MPI_Barrier(MPI_COMM_WORLD);
  if (const int code = surrogate_destroy(&surrogate); code != 0) {
    return fail("destroy", code);
  }
  // MPI is still the simulation's.
  double largest = 0;
  MPI_Reduce(&loss, &largest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    std::printf("loss %.9f of %d training rank(s)\n", largest, num_training);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0, rank = 0, num_ranks = 1;
  // libddp calls MPI from a thread of its own.
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &num_ranks);
  const int code = simulate(rank, num_ranks);
  if (code != 0) {
    MPI_Abort(MPI_COMM_WORLD, code);
  }
  MPI_Finalize();
  return code;
}
