# SPDX-License-Identifier: Apache-2.0
if(DDP_HAS_CUDA)
  # The same source as on CPU, over NCCL.
  ddp_add_test(NAME nccl_communicator_ops_test
               SOURCES ${PROJECT_SOURCE_DIR}/tests/distributed/communicator_test.cpp
               RANKS 1 2 4 LABELS gpu)
  ddp_add_test(NAME nccl_communicator_test SOURCES nccl_communicator_test.cpp
               RANKS 1 2 4 LABELS gpu)
  target_link_libraries(nccl_communicator_test PRIVATE NCCL::nccl CUDA::cudart)
endif()
