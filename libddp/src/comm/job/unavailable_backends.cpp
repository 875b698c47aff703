// SPDX-License-Identifier: Apache-2.0
// Replaces the backends that this build lacks.
#include "comm/job/create_communicator.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

#ifndef DDP_HAS_MPI
std::shared_ptr<MpiRuntime> MpiRuntime::create(std::chrono::milliseconds) {
  throw SettingsError(
      concat("several ranks on CPU need MPI, and this libddp was built without it; fix: ", kMpiFix,
             "`mpirun` or `srun --mpi=pmix`; ranks on GPUs need no MPI"));
}
bool MpiRuntime::is_built_in() {
  return false;
}
CommunicatorPtr make_mpi_communicator(std::shared_ptr<MpiRuntime>, const MpiCommunicatorOptions&) {
  throw InternalError("built without MPI");
}
#endif

#ifndef DDP_HAS_CUDA
CommunicatorPtr make_nccl_communicator(ControlPlane&, at::Device, const CommunicatorOptions&,
                                       CollectiveFailureHandler, std::shared_ptr<CollectiveCheck>,
                                       const AddProbe&) {
  throw SettingsError(
      "context.communicator.backend=nccl: this libddp was built without CUDA; fix: build it where "
      "nvcc and a LibTorch with CUDA are found (-DDDP_WITH_CUDA=ON reports what is missing), or "
      "use "
      "context.device=cpu");
}
#endif

}  // namespace ddp::detail
