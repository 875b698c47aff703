// SPDX-License-Identifier: Apache-2.0
// BatchNorm with the statistics of the batches of all ranks.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>

#include "ddp/comm/communicator.hpp"
#include "ddp/ops/batch_norm.hpp"

namespace ddp {

/// Parameters, buffers and their names are torch::nn::BatchNorm's; input [N, C, ...] of any rank,
/// any memory format, float32/64, float16 or bfloat16 (statistics in float32). Equal to BatchNorm
/// on the concatenation of all ranks' inputs, whose counts may differ and may be 0. In training a
/// forward and a backward are collective. Formulas: merge of means and variances after Chan et al.;
/// backward as Ioffe and Szegedy, with sums over all ranks:
///   dx = (dy - sum_dy/n - (x-mean) invstd^2 sum_dy_xmu/n) weight invstd
/// weight's and bias's gradients are this rank's share: DistributedDataParallel averages them.
///
/// Our models compute it with what follows it, on CUDA by the kernels of ddp/ops/batch_norm.hpp;
/// forward() is ATen's ops.
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl>, public ops::FusableNorm {
 public:
  SyncBatchNormImpl(int64_t num_features, CommunicatorPtr communicator,
                    const torch::nn::BatchNormOptions& options);
  SyncBatchNormImpl(int64_t num_features, CommunicatorPtr communicator)
      : SyncBatchNormImpl(num_features, std::move(communicator),
                          torch::nn::BatchNormOptions(num_features)) {}

  void reset() override;
  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;
  std::optional<ops::BatchNormLayer> fusable_layer() const override;
  torch::Tensor batch_counter() const override { return num_batches_tracked; }

  torch::nn::BatchNormOptions options;
  torch::Tensor weight, bias, running_mean, running_var, num_batches_tracked;

 private:
  std::shared_ptr<ops::StatisticsExchange> exchange_;
};
TORCH_MODULE(SyncBatchNorm);

/// Replaces every torch::nn::BatchNorm1d/2d/3d that sits in a Sequential or in a module that is an
/// ops::NormOwner (our models are) by a SyncBatchNorm whose parameters and buffers share the old
/// ones' memory: make optimizers afterwards. A BatchNorm held as any other typed member cannot be
/// replaced in C++: throws SettingsError naming it, and nothing is replaced.
void convert_sync_batchnorm(torch::nn::Module& module, const CommunicatorPtr& communicator);

}  // namespace ddp
