# SPDX-License-Identifier: Apache-2.0
ddp_add_test(NAME communicator_test SOURCES communicator_test.cpp communicator_groups_test.cpp communicator_plan_test.cpp RANKS 1 2 4)
if(DDP_HAS_MPI)
  # Owns MPI itself: no Context, Catch2's plain main.
  add_executable(mpi_communicator_test mpi_communicator_test.cpp)
  target_link_libraries(mpi_communicator_test PRIVATE ddp ddp_test_main ddp_warnings)
  target_include_directories(mpi_communicator_test PRIVATE ${PROJECT_SOURCE_DIR}/libddp/src)
  ddp_use_pch(mpi_communicator_test TEST)
  foreach(_ranks 1 2 4)
    ddp_add_launch(NAME mpi_communicator_test_r${_ranks} PROGRAM mpi_communicator_test
                   RANKS ${_ranks} TIMEOUT 60)
  endforeach()
endif()
