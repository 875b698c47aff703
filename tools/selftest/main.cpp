// SPDX-License-Identifier: Apache-2.0
// Do the ranks of this job compute what one process would? Start it like a trainer:
//
//   libddp-selftest
//   mpirun -n 4 libddp-selftest
//   srun libddp-selftest
//   torchrun --no-python --nproc-per-node=8 libddp-selftest
//
// Each rank trains small models and computes the same steps in a plain module on the batches of all
// ranks. Rank 0 prints a line for each way to train, and a verdict. Exit code: 0 all are equal, 1
// one is not; others as of every program of libddp.
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/ddp.hpp"
#include "ddp/detail/text.hpp"
#include "ddp/reduce/join.hpp"
#include "modes.hpp"

namespace selftest {
namespace {

using ddp::concat;
using ddp::exact::Mlp;
using torch::Tensor;

struct Options {
  int64_t break_rank = -1;
};
void describe_fields(Options& options, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "break_rank",
                 .doc = "doubles the loss of this rank, to see the test fail; -1: of none"},
                options.break_rank);
}

constexpr int kMostBf16Ranks = 32;
constexpr double kRoundings = 1e-5;  ///< of float32, relative to the largest element of a tensor

/// Sums of integers over 2^n ranks are exact in any order, and so are their means.
double tolerance_of(const Mode& mode, int world_size) {
  const bool is_exact = (world_size & (world_size - 1)) == 0 && world_size <= 128;
  return mode.tolerance > 0 || is_exact ? mode.tolerance : kRoundings;
}

/// Empty if both are equal within the tolerance.
std::string difference(const std::string& what, const Tensor& actual, const Tensor& expected,
                       double tolerance) {
  if (!actual.defined() || !expected.defined()) {
    return actual.defined() == expected.defined()
               ? ""
               : concat(what,
                        actual.defined() ? ": defined, but unused on all ranks" : ": missing");
  }
  const auto mine = actual.detach().to(torch::kFloat).reshape(-1);
  const auto other = expected.detach().to(torch::kFloat).reshape(-1);
  const auto distance = (mine - other).abs();
  const double limit =
      tolerance == 0 ? 0 : tolerance * std::max(1.0, other.abs().max().item<double>());
  if (distance.le(limit).all().item<bool>()) {  // false for NaN
    return "";
  }
  const auto worst = distance.argmax();  // of a NaN, if there is one
  return concat(what, ": ", mine[worst].item<float>(), " instead of ", other[worst].item<float>());
}

/// The wrapped model of this rank, and a plain one that takes the batches of all ranks.
struct Twins {
  Twins(const ddp::Context& context, const Mode& mode)
      : module(context.device(), 7, mode.width), plain(context.device(), 7, mode.width) {
    module->to(mode.dtype);
    model.emplace(module, context.communicator(), mode.ddp);
    optimizer = ddp::make_optimizer(*model, {.momentum = kMomentum, .zero1 = mode.zero1});
    plain_optimizer = std::make_unique<torch::optim::SGD>(
        plain->parameters(), torch::optim::SGDOptions(kLr).momentum(kMomentum));
  }

  void step_plain(const Mode& mode, int64_t step) {
    plain_optimizer->zero_grad();
    mode.loss(plain, step).backward();
    plain_optimizer->step();
  }
  /// Both continue with integers, so that the next step is exact too. They are made anew: ranks may
  /// round the trained parameters differently.
  void take_integers(int64_t step) {
    const torch::NoGradGuard no_grad;
    const auto mine = module->parameters(), others = plain->parameters();
    for (size_t i = 0; i < mine.size(); ++i) {
      const auto seed = 100 * (step + 100) + static_cast<int64_t>(i);
      others[i].copy_(ddp::exact::integers(others[i].sizes().vec(), seed));
      mine[i].copy_(others[i]);
    }
  }
  /// The first difference; empty if there is none.
  std::string compare(double tolerance, bool with_gradients) const {
    const auto names = module->named_parameters();
    for (size_t i = 0; i < names.size(); ++i) {
      const auto& name = names[i].key();
      const auto& mine = names[i].value();
      const auto other = plain->parameters()[i];
      auto found = with_gradients
                       ? difference("gradient of " + name, mine.grad(), other.grad(), tolerance)
                       : std::string();
      if (found.empty()) {
        found = difference("parameter " + name, mine, other, tolerance);
      }
      if (!found.empty()) {
        return found;
      }
    }
    return "";
  }

  Mlp module, plain;
  std::optional<Model> model;
  std::unique_ptr<ddp::Optimizer> optimizer;
  std::unique_ptr<torch::optim::SGD> plain_optimizer;
};

/// Returns this rank's first difference; empty if there is none.
std::string check_mode(ddp::Context& context, const Mode& mode) {
  Twins twins(context, mode);
  ddp::GraphedStep graphed(
      context, {.models = {&*twins.model}, .optimizers = {twins.optimizer.get()}},
      [&](const Tensor& rows, const ddp::StepScalars& scalars) {
        twins.model->zero_grad();
        const auto loss = twins.model->forward(rows).sum();
        loss.backward();
        twins.optimizer->step(scalars);
        return loss.detach();
      },
      ddp::GraphedStepOptions{.mode = mode.is_captured ? ddp::CudaGraph::On : ddp::CudaGraph::Off});
  const auto train = [&](int64_t step) {
    if (mode.is_captured) {
      graphed(rows_of(context, context.rank(), step), {.lr = kLr, .step = step});
      return;
    }
    twins.model->zero_grad();
    mode.backward(*twins.model, step);
    twins.optimizer->step(kLr);
  };
  const double tolerance = tolerance_of(mode, context.world_size());
  std::string problem;
  int64_t step = 0;
  const auto make_step = [&](bool) {
    context.set_progress(step, mode.name);
    train(step);
    twins.step_plain(mode, step);
    const auto found = twins.compare(tolerance, /*with_gradients=*/!mode.zero1);
    if (problem.empty() && !found.empty()) {
      problem = concat("step ", step, ", ", found);
    }
    twins.take_integers(++step);
  };
  if (mode.is_uneven) {
    ddp::join(*twins.model, make_step, [&] { return step < num_batches_of(context.rank()); });
  }
  while (step < kNumSteps) {
    make_step(true);
  }
  if (problem.empty() && mode.is_captured && graphed.counts().replayed == 0) {
    problem = "no step was replayed: " + graphed.counts().why_eager;
  }
  return problem;
}

/// After each backward all ranks have rank 0's running statistics. Returns this rank's first
/// difference; empty if there is none.
std::string check_buffers(const ddp::Context& context) {
  torch::nn::BatchNorm1d module(4), plain(4);
  module->to(context.device());
  plain->to(context.device());
  ddp::DistributedDataParallel model(module, context.communicator());
  std::string problem;
  for (int64_t step = 0; step < kNumSteps; ++step) {
    model.zero_grad();
    model.forward(rows_of(context, context.rank(), step)).sum().backward();
    plain->forward(rows_of(context, 0, step));
    const auto mine = module->named_buffers(), others = plain->named_buffers();
    for (size_t i = 0; i < mine.size() && problem.empty(); ++i) {
      problem = difference(concat("step ", step, ", ", mine[i].key()), mine[i].value(),
                           others[i].value(), kRoundings);
    }
  }
  return problem;
}

/// Counts the checks, and prints their lines on rank 0.
class Report {
 public:
  explicit Report(const ddp::Context& context) : context_(context) {
    if (context.is_main()) {
      std::cout << concat("libddp-selftest: ", ranks(), ", ", context.communicator()->backend(),
                          ", ", context.device().str(), ", started by ", context.launcher())
                << std::endl;
    }
  }

  /// Collective. `problem` is this rank's.
  void add(const std::string& name, const std::string& says, const std::string& problem) {
    ++num_checks_;
    const auto problems = context_.control_plane().all_gather(problem);
    for (size_t rank = 0; rank < problems.size(); ++rank) {
      if (!problems[rank].empty()) {
        ++num_failed_;
        print(
            "FAILED", name,
            concat("rank ", rank, " on ", context_.membership().hosts[rank], ", ", problems[rank]));
        return;  // the first rank's is enough
      }
    }
    print("equal", name, says);
  }
  void skip(const std::string& name, const std::string& why) { print("skipped", name, why); }

  /// True on all ranks if no check failed.
  bool print_verdict() const {
    if (context_.is_main()) {
      std::cout << (num_failed_ == 0
                        ? concat("PASSED: in all ", num_checks_, " checks ", ranks(),
                                 context_.world_size() == 1
                                     ? ": nothing was sent; start it with srun, mpirun or torchrun"
                                     : " compute what one process computes")
                        : concat("FAILED: ", num_failed_, " of ", num_checks_, " checks of ",
                                 ranks()))
                << std::endl;
    }
    return num_failed_ == 0;
  }

 private:
  std::string ranks() const {
    const int ranks = context_.world_size(), nodes = context_.num_nodes();
    return concat(ranks, ranks == 1 ? " rank on " : " ranks on ", nodes,
                  nodes == 1 ? " node" : " nodes");
  }
  void print(std::string verdict, std::string name, const std::string& text) const {
    verdict.resize(9, ' ');
    name.resize(14, ' ');
    if (context_.is_main()) {
      std::cout << concat(verdict, name, ddp::detail::printable(text)) << std::endl;
    }
  }

  const ddp::Context& context_;
  int num_checks_ = 0;
  int num_failed_ = 0;
};

std::string tolerance_text(double tolerance) {
  return tolerance == 0 ? ": equal bits"
                        : concat(": within ", tolerance, " of the largest element");
}

bool check_all(ddp::Context& context, const Options& options) {
  if (options.break_rank < -1 || options.break_rank >= context.world_size()) {
    throw ddp::SettingsError(concat("selftest.break_rank=", options.break_rank,
                                    " must be a rank of this job, 0 to ", context.world_size() - 1,
                                    ", or -1 for none"));
  }
  at::globalContext().setAllowTF32CuBLAS(false);  // products of integers are exact
  Report report(context);
  for (auto& mode : make_modes(context)) {
    if (mode.is_captured && !context.device().is_cuda()) {
      report.skip(mode.name, mode.says + ": needs a GPU");
      continue;
    }
    if (mode.dtype == torch::kBFloat16 && context.world_size() > kMostBf16Ranks) {
      report.skip(mode.name, concat(mode.says, ": for up to ", kMostBf16Ranks,
                                    " ranks, above which roundings hide a missing one"));
      continue;
    }
    if (mode.name == "plain" && options.break_rank == context.rank()) {
      mode.backward = [&context](Model& model, int64_t step) {
        (2 * model.forward(rows_of(context, context.rank(), step)).sum()).backward();
      };
    }
    const double tolerance = tolerance_of(mode, context.world_size());
    report.add(mode.name, mode.says + tolerance_text(tolerance), check_mode(context, mode));
  }
  report.add("buffers",
             concat("rank 0's running statistics on all ranks", tolerance_text(kRoundings)),
             check_buffers(context));
  return report.print_verdict();
}

}  // namespace
}  // namespace selftest

int main(int argc, char** argv) {
  std::optional<bool> has_passed;  // none: --help, or an error ended the job
  const auto check = [&](ddp::Context& context, const ddp::Config& config) {
    has_passed = selftest::check_all(context, config.section<selftest::Options>("selftest"));
  };
  const auto sections = ddp::only_sections(
      {}, {ddp::declare_section<selftest::Options>("selftest", "the test itself")});
  const int code = ddp::run(argc, argv, check, sections);
  return code == 0 && has_passed == false ? 1 : code;
}
