# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Prepares a shell for the commands of the pages: `source scripts/env.sh`, in bash or zsh, from any folder.
# A variable that is already set keeps its value. The scripts source this file too.

_ddp_env_root=$(CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)

# cmake, ninja, mpirun and torchrun, as far as the scripts installed them.
_ddp_env_bin=${DDP_VENV:-$_ddp_env_root/.venv}/bin
case ":$PATH:" in
  *":$_ddp_env_bin:"*) ;;
  *) [ ! -d "$_ddp_env_bin" ] || PATH=$_ddp_env_bin:$PATH ;;
esac
unset _ddp_env_root _ddp_env_bin

# Open MPI refuses to run as root: containers have no other user.
export OMPI_ALLOW_RUN_AS_ROOT=${OMPI_ALLOW_RUN_AS_ROOT:-1}
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}

# It also refuses more ranks than cores. Ranks that wait then give their core to the others. By default it binds each
# of two ranks, with its loader and communication threads, to one core. Open MPI 5 reads the PRTE variables.
export OMPI_MCA_rmaps_base_oversubscribe=${OMPI_MCA_rmaps_base_oversubscribe:-1}
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
export OMPI_MCA_hwloc_base_binding_policy=${OMPI_MCA_hwloc_base_binding_policy:-none}
export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy:-slot:oversubscribe}
export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy:-none}

# NVLink multicast is off, as in all published figures (docs/running.md#nvlink-multicast).
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
