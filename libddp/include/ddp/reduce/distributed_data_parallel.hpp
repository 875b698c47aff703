// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: averages a module's gradients over the ranks while backward runs.
//
//   auto module = models::resnet18({.num_classes = 10});
//   module->to(ctx.device());
//   ddp::DistributedDataParallel model(module, ctx.communicator());
//   auto loss = torch::cross_entropy_loss(model.forward(images), labels);
//   loss.backward();          // .grad is the mean over all ranks
//   optimizer->step(lr);
//
// The module may be a torch::nn holder, a shared_ptr to a torch::nn::Module with any forward
// signature, or a torch::jit::Module. Move and convert it before wrapping.
#pragma once

#include <ATen/core/grad_mode.h>

#include <typeinfo>
#include <utility>
#include <vector>

#include "ddp/detail/module_tensors.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "ddp/detail/visit_tensors.hpp"
#include "ddp/reduce/data_parallel_model.hpp"

namespace ddp {

template <typename Module>
class DistributedDataParallel : public DataParallelModel {
 public:
  /// Collective; see DataParallelModel.
  DistributedDataParallel(Module module, CommunicatorPtr communicator,
                          const DdpOptions& options = {})
      : DataParallelModel(detail::tensors_of_any(module), std::move(communicator), options),
        module_(std::move(module)) {}

  /// Runs the module's forward. In grad mode and outside no_sync() it also prepares the backward
  /// that averages the gradients. See BroadcastBuffers for when buffers are sent.
  template <typename... Args>
  auto forward(Args&&... args) {
    const TraceScope trace("forward", "compute");
    before_forward();
    auto output = detail::call_forward(module_, std::forward<Args>(args)...);
    std::vector<at::Tensor> outputs;
    bool known = true;
    if (at::GradMode::is_enabled()) {
      known = detail::visit_tensors(
          output, TensorVisitor([&](const at::Tensor& tensor) { outputs.push_back(tensor); }));
    }
    after_forward(outputs, known, typeid(output).name());
    return output;
  }

  /// The same as forward().
  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  Module& module() { return module_; }  ///< as wrapped

  void train(bool on = true) { detail::module_of(module_).train(on); }  ///< sets the module's mode
  /// Collective with broadcast_buffers=before_eval: sends rank 0's buffers to all ranks.
  void eval() {
    if (options().broadcast_buffers == BroadcastBuffers::BeforeEval) {
      sync_buffers();
    }
    train(false);
  }

 private:
  Module module_;
};

}  // namespace ddp
