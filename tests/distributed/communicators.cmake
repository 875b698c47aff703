# SPDX-License-Identifier: Apache-2.0
ddp_add_test(NAME communicator SOURCES comm/collective_check_test.cpp comm/communicator_exchange_test.cpp
             comm/communicator_groups_test.cpp comm/communicator_plan_test.cpp comm/communicator_test.cpp RANKS 1 2 4)
# Collectives with gradients against one process.
ddp_add_test(NAME functional SOURCES comm/functional_model_test.cpp comm/functional_test.cpp RANKS 1 2 4 TIMEOUT 120)
target_compile_definitions(functional PRIVATE DDP_GOLDEN_DIR="${PROJECT_SOURCE_DIR}/tests/golden")
if(DDP_HAS_MPI)
  # Owns MPI itself: no Context, Catch2's plain main.
  add_executable(mpi_communicator comm/mpi_communicator_test.cpp)
  target_link_libraries(mpi_communicator PRIVATE ddp ddp_test_main ddp_warnings)
  target_include_directories(mpi_communicator PRIVATE ${PROJECT_SOURCE_DIR}/libddp/src)
  ddp_use_pch(mpi_communicator TEST)
  foreach(_ranks 1 2 4)
    ddp_add_launch(NAME mpi_communicator_r${_ranks} PROGRAM mpi_communicator
                   RANKS ${_ranks} TIMEOUT 60)
  endforeach()
endif()
# Several contexts in one process, and MPI that somebody else initialised.
if(DDP_HAS_MPI)
  add_executable(contexts_program comm/contexts_program.cpp)
  target_link_libraries(contexts_program PRIVATE ddp MPI::MPI_C ddp_warnings)
  target_include_directories(contexts_program PRIVATE ${PROJECT_SOURCE_DIR}/libddp/src)
  target_compile_definitions(contexts_program PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  ddp_use_pch(contexts_program TEST)
  function(ddp_add_contexts name arguments codes)
    set(_options --expect-exit ${codes})
    foreach(_text ${ARGN})
      list(APPEND _options --expect-output ${_text})
    endforeach()
    ddp_add_launch(NAME contexts_${name} PROGRAM contexts_program ARGUMENTS ${arguments} RANKS 2
                   TIMEOUT 30 OPTIONS ${_options})
  endfunction()
  ddp_add_contexts(twice "twice" "*:0" "0:done" "1:done" "0:MPI was finalized")
  ddp_add_contexts(both "both" "*:0" "0:done" "1:done" "0:MPI was finalized")
  ddp_add_contexts(late "late" "*:0" "0:done" "1:done" "0:MPI was finalized" "1:MPI was finalized")
  ddp_add_contexts(split "split" "*:0" "0:done" "1:done" "0:MPI was finalized")
  ddp_add_contexts(level_serialized "level;SERIALIZED" "*:64" "0:MPI_THREAD_MULTIPLE")
  ddp_add_contexts(level_multiple "level;MULTIPLE" "*:0" "0:done" "1:done")
  ddp_add_contexts(settings "settings" "*:70" "0:context.communicator.check_collectives differs between ranks")
  ddp_add_contexts(sizes "sizes;100;50" "*:70" "0:tensors of different sizes" "1:tensors of different sizes"
                   "0:or give `sizes` to all_gather")
  ddp_add_contexts(finalized "finalized" "*:64" "0:MPI_Finalize")
  # A program with a launcher and a loop of its own, without ddp::run, Metrics and Checkpointer. What a rank has
  # destroyed before it leaves hides no deadlock.
  add_executable(host_program comm/host_program.cpp)
  target_link_libraries(host_program PRIVATE ddp ddp_warnings)
  ddp_use_pch(host_program TEST)
  function(ddp_add_host name arguments codes)
    set(_options --expect-exit ${codes})
    foreach(_text ${ARGN})
      list(APPEND _options --expect-output ${_text})
    endforeach()
    ddp_add_launch(NAME host_${name} PROGRAM host_program ARGUMENTS ${arguments} RANKS 3 TIMEOUT 20
                   OPTIONS ${_options})
  endfunction()
  set(_left "0:first cause: rank 1 (" "0:) left at an unknown step (call Context::set_progress) in close after ")
  ddp_add_host(leaves "leave;world" "1:70,*:76" ${_left} "0: in all_reduce #" "2:left in time")
  ddp_add_host(leaves_split "leave;split" "2:76,*:70" ${_left} "0: in all_reduce #" "2:left in time")
  ddp_add_host(leaves_split_checked "leave;split;check" "*:70" ${_left} "0: in the check of all_reduce #"
               "2:left in time")
  ddp_add_host(dies "die;split" "1:137,*:76" "0:first cause: rank 1 ("
               "0:failed at an unknown step (call Context::set_progress) in code after backward: its connection closed")
  ddp_add_host(dies_early "die_early;split" "1:137,*:76" "0:failed before the first step: its connection closed")
  # Ranks that leave, while the others meet again and go on training.
  add_executable(generations_program comm/generations_program.cpp)
  target_link_libraries(generations_program PRIVATE ddp ddp_warnings)
  target_include_directories(generations_program PRIVATE ${PROJECT_SOURCE_DIR}/libddp/src)
  ddp_use_pch(generations_program TEST)
  ddp_add_launch(NAME generations_one_leaves PROGRAM generations_program ARGUMENTS train 3 RANKS 4 TIMEOUT 60
                 OPTIONS --expect-output 3:left --expect-output 0:done --expect-output 2:done)
  ddp_add_launch(NAME generations_to_one_rank PROGRAM generations_program ARGUMENTS train 1 0 1 RANKS 4
                 TIMEOUT 60 OPTIONS --expect-output 0:left --expect-output 1:left --expect-output 3:left
                 --expect-output 2:done)
  ddp_add_launch(NAME generations_failure PROGRAM generations_program ARGUMENTS fail 1 2 RANKS 4 TIMEOUT 60
                 OPTIONS --expect-exit "1:0,*:65" --expect-output "0:first cause: rank 2 ("
                 --expect-output "0:of generation 1 failed at step 7 in backward: shard 3 is truncated"
                 --expect-output "2:of generation 1 failed at step 7")
  # Nobody started these processes as ranks: none may train alone.
  foreach(_rank 0 1)
    add_test(NAME contexts_pmix_rank_${_rank}_alone COMMAND ${CMAKE_COMMAND} -E env --unset=PMIX_NAMESPACE
             PMIX_RANK=${_rank} $<TARGET_FILE:contexts_program> once)
    set_tests_properties(contexts_pmix_rank_${_rank}_alone PROPERTIES TIMEOUT 30
                         PASS_REGULAR_EXPRESSION "PMIX_RANK=${_rank} is set but PMIX_NAMESPACE is not")
  endforeach()
  add_test(NAME contexts_open_mpi_rank_alone COMMAND ${CMAKE_COMMAND} -E env OMPI_COMM_WORLD_RANK=1
           OMPI_COMM_WORLD_SIZE=2 $<TARGET_FILE:contexts_program> once)
  set_tests_properties(contexts_open_mpi_rank_alone PROPERTIES TIMEOUT 30
                       PASS_REGULAR_EXPRESSION "mpirun set rank 1 of 2 in the environment, but MPI started this process as rank 0 of 1")
  add_test(NAME contexts_world_size_alone COMMAND ${CMAKE_COMMAND} -E env --unset=RANK WORLD_SIZE=2
           $<TARGET_FILE:contexts_program> once)
  set_tests_properties(contexts_world_size_alone PROPERTIES TIMEOUT 30
                       PASS_REGULAR_EXPRESSION "WORLD_SIZE=2 is set but RANK is not")
endif()
