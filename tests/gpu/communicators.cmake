# SPDX-License-Identifier: Apache-2.0
if(DDP_HAS_CUDA)
  # The communicator tests over NCCL: the same program as on CPU, one GPU a rank.
  foreach(_ranks 1 2 4)
    ddp_add_launch(NAME gpu_communicator_r${_ranks} PROGRAM communicator RANKS ${_ranks}
                   LABELS gpu)
    set_property(TEST gpu_communicator_r${_ranks} PROPERTY ENVIRONMENT DDP_TEST_CHECK_COLLECTIVES=1)
  endforeach()
  # Collectives with gradients: the same program as on the CPU, and captured ones.
  foreach(_ranks 1 2 4)
    ddp_add_launch(NAME gpu_functional_r${_ranks} PROGRAM functional RANKS ${_ranks} LABELS gpu TIMEOUT 120)
  endforeach()
  ddp_add_test(NAME gpu_functional_graph SOURCES functional_graph_test.cpp LIBRARIES ddp CUDA::cudart RANKS 1 2 LABELS gpu)
  ddp_add_test(NAME gpu_nccl_communicator SOURCES nccl_communicator_test.cpp RANKS 1 2 4 LABELS gpu)
  foreach(_ranks 1 2 4)
    set_property(TEST gpu_nccl_communicator_r${_ranks} PROPERTY ENVIRONMENT DDP_TEST_CHECK_COLLECTIVES=1)
  endforeach()
  ddp_use_nccl(gpu_nccl_communicator)
  ddp_add_test(NAME gpu_nccl_works SOURCES nccl_works_test.cpp RANKS 1 2 4 LABELS gpu)
  ddp_use_nccl(gpu_nccl_works)
  ddp_add_test(NAME gpu_nccl_reductions SOURCES nccl_reductions_test.cpp RANKS 1 2 4 LABELS gpu)
  ddp_use_nccl(gpu_nccl_reductions)
endif()
