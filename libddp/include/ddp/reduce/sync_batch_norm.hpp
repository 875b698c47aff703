// SPDX-License-Identifier: Apache-2.0
// BatchNorm with statistics over the batches of all ranks.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>

#include "ddp/comm/communicator.hpp"
#include "ddp/detail/fusable_norm.hpp"
#include "ddp/ops/vision.hpp"

namespace ddp {

/// Parameters, buffers and their names are torch::nn::BatchNorm's. The input is [N, C, ...] with
/// any number of dimensions, in any memory format, in float32/64, float16 or bfloat16 (statistics
/// in float32). The result equals BatchNorm on all ranks' inputs; batches may differ in size or be
/// empty. In training, forward and backward are collective. DistributedDataParallel averages the
/// gradients.
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl>, public ops::FusableNorm {
 public:
  /// `communicator` joins the ranks whose batches count.
  SyncBatchNormImpl(int64_t num_features, CommunicatorPtr communicator,
                    const torch::nn::BatchNormOptions& options);
  SyncBatchNormImpl(int64_t num_features, CommunicatorPtr communicator)
      : SyncBatchNormImpl(num_features, std::move(communicator),
                          torch::nn::BatchNormOptions(num_features)) {}
  /// For convert_sync_batchnorm: takes the place of `norm`, a torch::nn::BatchNorm1d/2d/3d with
  /// `options`. Parameters and buffers are the same objects.
  SyncBatchNormImpl(const torch::nn::Module& norm, CommunicatorPtr communicator,
                    const torch::nn::BatchNormOptions& options);

  void reset() override;
  torch::Tensor forward(const torch::Tensor& input);                  ///< collective in training
  void pretty_print(std::ostream& stream) const override;             ///< one line
  std::optional<ops::BatchNormLayer> fusable_layer() const override;  ///< for fused ops of models
  torch::Tensor batch_counter() const override { return num_batches_tracked; }  ///< of fused ops

  torch::nn::BatchNormOptions options;  ///< as given to the constructor
  torch::Tensor weight, bias, running_mean, running_var, num_batches_tracked;  ///< BatchNorm's

 private:
  std::shared_ptr<ops::StatisticsExchange> exchange_;
};
TORCH_MODULE(SyncBatchNorm);

/// Replaces every torch::nn::BatchNorm1d/2d/3d in a Sequential or an ops::NormOwner by a
/// SyncBatchNorm with the same parameter and buffer objects, so optimizers that were made before
/// train them. A norm that occurs several times stays one module. Throws SettingsError and changes
/// nothing if a BatchNorm is a typed member of another module, or `module` itself.
/// The batch norms in the programs of ExportedModules become such norms too.
void convert_sync_batchnorm(torch::nn::Module& module, const CommunicatorPtr& communicator);

}  // namespace ddp
