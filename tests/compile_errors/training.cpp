// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <string>
#include <vector>

#include "ddp/amp/amp.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/checkpoint.hpp"
#include "ddp/train/metrics.hpp"

namespace {

struct Net : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return x; }
};
struct Deduced : Net {};

struct Position {
  int64_t step = 0;
};

}  // namespace

void wrap_wrong_modules(const ddp::CommunicatorPtr& communicator) {
  // error: DistributedDataParallel takes no module by value: pass std::make_shared<Net>(…), a
  ddp::DistributedDataParallel<Net> by_value(Net(), communicator);
  by_value.forward(torch::ones(1)).sum().backward();
  by_value.eval();
  // error: DistributedDataParallel takes no module by value: pass std::make_shared<Net>(…), a
  ddp::DistributedDataParallel deduced(Deduced(), communicator);
  deduced.forward(torch::ones(1)).sum().backward();
}

void save_wrong_objects(const ddp::Context& context, ddp::DataParallelModel& model) {
  Position position;
  // error: a Checkpointer stores objects of classes derived from ddp::Stateful, pointers to them
  ddp::Checkpointer of_position(context, {}, {model, position});
  torch::nn::Linear module(2, 2);
  // error: a Checkpointer stores objects of classes derived from ddp::Stateful, pointers to them
  ddp::Checkpointer of_module(context, {}, {model, {"module", module}});
  // error: keep the object in a variable that is not const
  ddp::Checkpointer of_temporary(context, {}, {model, ddp::make_optimizer(model, {})});
  const ddp::GradScaler scaler;
  // error: keep the object in a variable that is not const
  ddp::Checkpointer of_const(context, {}, {model, scaler});
}

void step_without_a_rate(ddp::Optimizer& optimizer) {
  // error: use of deleted function 'void ddp::Optimizer::step(
  optimizer.step({});
  optimizer.step();  // right, for comparison
  optimizer.step({.lr = 0.1});
}

void log_wrong_metrics(ddp::Metrics& metrics) {
  // error: a metric is a number, a one-element tensor, or a number of a GraphedStep's log
  metrics.log("scores", std::vector<double>{0.1, 0.2});
  // error: a metric is a number, a one-element tensor, or a number of a GraphedStep's log
  metrics.end_step(0, {.loss = std::string("0.5")});
  metrics.log("loss", torch::ones(1).item());  // right, for comparison
}
