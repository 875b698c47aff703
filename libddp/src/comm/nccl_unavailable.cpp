// SPDX-License-Identifier: Apache-2.0
// Replaces the NCCL files in a build without CUDA.
#include "comm/nccl_communicator.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

CommunicatorPtr make_nccl_communicator(ControlPlane&, at::Device, const CommunicatorOptions&,
                                       CollectiveFailureHandler, std::shared_ptr<CollectiveCheck>,
                                       const WatchPosition&) {
  throw SettingsError(
      "context.communicator.backend=nccl: this libddp was built without CUDA; build it where nvcc "
      "and a "
      "LibTorch with CUDA are found (-DDDP_WITH_CUDA=ON says what is missing), or use "
      "context.device=cpu");
}

}  // namespace ddp::detail
