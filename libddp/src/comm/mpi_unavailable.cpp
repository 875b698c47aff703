// SPDX-License-Identifier: Apache-2.0
// Replaces the MPI files in a build without MPI.
#include "comm/mpi_communicator.hpp"
#include "comm/mpi_runtime.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

[[noreturn]] void refuse() {
  throw SettingsError(
      "several ranks on CPU need MPI, and this libddp was built without it: install it (Debian: "
      "libopenmpi-dev openmpi-bin), build with -DDDP_WITH_MPI=ON, and start the program with "
      "`mpirun` "
      "or `srun --mpi=pmix`; ranks on GPUs need no MPI");
}

}  // namespace

std::shared_ptr<MpiRuntime> MpiRuntime::create(std::chrono::milliseconds) {
  refuse();
}
bool MpiRuntime::is_built_in() {
  return false;
}
CommunicatorPtr make_mpi_communicator(std::shared_ptr<MpiRuntime>, const MpiCommunicatorOptions&) {
  refuse();
}

}  // namespace ddp::detail
