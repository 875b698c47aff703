// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/graphed_step.hpp"

namespace {

struct Opaque {
  at::Tensor loss;
};

}  // namespace

void make_wrong_steps(ddp::Context& context, const ddp::GraphedParts& parts) {
  // error: ddp::GraphedStep does not know the tensors of its batch: define for_each_tensor(MyBatch&
  ddp::GraphedStep of_batch(
      context, parts, [](const Opaque& batch, const ddp::StepScalars&) { return batch.loss; });
  of_batch({}, {});

  // error: ddp::GraphedStep does not know the tensors of the step's result: define for_each_tensor(
  ddp::GraphedStep of_result(
      context, parts, [](const at::Tensor& loss, const ddp::StepScalars&) { return Opaque{loss}; });
  of_result({}, {});
}
