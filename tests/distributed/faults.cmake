# SPDX-License-Identifier: Apache-2.0
# Ranks that fail on purpose: exit codes of all ranks, and what rank 0 prints.
add_executable(fault_program comm/fault_program.cpp)
target_link_libraries(fault_program PRIVATE ddp ddp_warnings)
target_include_directories(fault_program PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/libddp/src)
ddp_use_pch(fault_program TEST)
add_executable(rendezvous_program comm/rendezvous_program.cpp)
target_link_libraries(rendezvous_program PRIVATE ddp_core ddp_warnings)
target_include_directories(rendezvous_program PRIVATE ${PROJECT_SOURCE_DIR}/libddp/src)

# ddp_add_fault(name rank-that-fails exit-codes expected-output…)
function(ddp_add_fault fault culprit codes)
  set(_options --expect-exit ${codes})
  foreach(_text ${ARGN})
    list(APPEND _options --expect-output ${_text})
  endforeach()
  ddp_add_launch(NAME fault_${fault}_r${culprit} PROGRAM fault_program ARGUMENTS ${fault} ${culprit}
                 RANKS 3 TIMEOUT 15 OPTIONS ${_options})
endfunction()
ddp_add_fault(throw 1 "*:1" "0:first cause: rank 1 (" "0:at step 5 in forward: forward of layer3 went wrong"
              "0:heard within 500 ms" "2:heard within 500 ms")
ddp_add_fault(throw 0 "*:1" "0:first cause: rank 0 (" "1:heard within 500 ms")
ddp_add_fault(data_error 2 "*:65" "0:at step 5 in forward: shard 7 is truncated")
ddp_add_fault(exit 1 "1:0,*:76" "0:first cause: rank 1 (" "0:heard within 500 ms")
ddp_add_fault(kill 1 "1:137,*:76" "0:first cause: rank 1 (" "0:at step 5 in forward: its connection closed"
              "0:heard within 500 ms" "2:heard within 500 ms")
ddp_add_fault(kill 0 "0:137,*:76" "1:first cause: rank 0 (" "1:heard within 500 ms" "2:heard within 500 ms")
ddp_add_fault(freeze 1 "*:76" "0:first cause: rank 1 (" "0:no sign of life for 600 ms")
ddp_add_fault(suspend 1 "*:0")
ddp_add_fault(freeze_start 1 "*:76" "0:did not end within 2000 ms" "0:missing: rank 1" "2:missing: rank 1")
ddp_add_fault(freeze_close 1 "*:76" "0:first cause: rank 1 (" "0:no sign of life for 600 ms")
# mpirun would report 1 for 0 without MPI_Finalize.
ddp_add_fault(freeze_exit 1 "*:76" "0:first cause: rank 1 (" "0:no sign of life for 600 ms"
              "0:left within 2500 ms" "2:at the end of MPI: rank 1 (" "2:left within 2500 ms")
ddp_add_fault(freeze_exit 0 "*:76" "1:first cause: rank 0 (" "1:no sign of life for 600 ms"
              "1:left within 2500 ms" "2:left within 2500 ms")

# exit() and static objects, while threads of libddp run.
add_executable(exit_program comm/exit_program.cpp)
target_link_libraries(exit_program PRIVATE ddp ddp_warnings)
target_include_directories(exit_program PRIVATE ${PROJECT_SOURCE_DIR}/libddp/src)
ddp_use_pch(exit_program TEST)
# ddp_add_exit(name ranks arguments exit-codes expected-output…)
function(ddp_add_exit name ranks arguments codes)
  set(_options --expect-exit ${codes})
  foreach(_text ${ARGN})
    list(APPEND _options --expect-output ${_text})
  endforeach()
  ddp_add_launch(NAME exit_${name}_r${ranks} PROGRAM exit_program ARGUMENTS ${arguments} RANKS ${ranks}
                 TIMEOUT 20 OPTIONS ${_options} UNHURRIED)
endfunction()
foreach(_ranks 1 2)
  ddp_add_exit(function ${_ranks} "function;3;all" "*:3" "0:left")
  ddp_add_exit(function_with_0 ${_ranks} "function;0;all" "*:0" "0:left")
  ddp_add_exit(static ${_ranks} "static" "*:0" "0:left")
  ddp_add_exit(static_local ${_ranks} "local" "*:0" "0:left")
  ddp_add_exit(static_communicator ${_ranks} "communicator" "*:0" "0:left")
  ddp_add_exit(static_with_3 ${_ranks} "static_exit;3" "*:3" "0:left")
  ddp_add_exit(child ${_ranks} "child" "*:0" "0:the child ended with 0")
  ddp_add_exit(thread ${_ranks} "thread;3;0" "*:3")
endforeach()
foreach(_rank 0 1)
  ddp_add_exit(function_of_${_rank} 2 "function;3;${_rank}" "*:3" "0:first cause: rank ${_rank} ("
               "0:at step 5 in forward: the program called exit(3) while its context was open" "${_rank}:left")
  ddp_add_exit(callback_of_${_rank} 2 "callback;3;${_rank}" "*:3" "0:first cause: rank ${_rank} (")
endforeach()
if(DDP_HAS_CUDA)
  function(ddp_add_gpu_exit name arguments code)
    foreach(_ranks 1 2)
      ddp_add_launch(NAME gpu_exit_${name}_r${_ranks} PROGRAM exit_program ARGUMENTS ${arguments} RANKS ${_ranks}
                     TIMEOUT 60 LABELS gpu OPTIONS --expect-exit "*:${code}" --expect-output "0:left")
    endforeach()
  endfunction()
  ddp_add_gpu_exit(function "function;3;all" 3)
  ddp_add_gpu_exit(static "static" 0)
  ddp_add_gpu_exit(static_local "local" 0)
  ddp_add_gpu_exit(static_communicator "communicator" 0)
  ddp_add_gpu_exit(static_with_3 "static_exit;3" 3)
endif()
# The other rank is told that this one left.
ddp_add_exit(function_with_0_of_1 2 "function;0;1" "*:70" "0:left at step 5 in forward")

function(ddp_add_rendezvous_fault name arguments codes)
  set(_options --launch env --expect-exit ${codes})
  foreach(_text ${ARGN})
    list(APPEND _options --expect-output ${_text})
  endforeach()
  ddp_add_launch(NAME rendezvous_${name} PROGRAM rendezvous_program ARGUMENTS ${arguments} RANKS 4
                 TIMEOUT 15 OPTIONS ${_options})
endfunction()
ddp_add_rendezvous_fault(meet "meet" "*:0")
ddp_add_rendezvous_fault(absent "absent;2" "2:0,*:76" "0:3 of 4 ranks joined within 1500 ms"
                         "0:missing: 2" "3:missing: 2")
ddp_add_rendezvous_fault(twice "twice;3;1" "*:64" "0:two processes claim rank 1: " "3:two processes claim rank 1: ")
ddp_add_rendezvous_fault(taken "taken" "0:64,*:76" "0:is already in use" "1:missing: 0")
ddp_add_rendezvous_fault(size "size;2" "*:64" "0:has WORLD_SIZE 5, rank 0 (" "2:has WORLD_SIZE 5")
ddp_add_rendezvous_fault(other_job "other_job;2" "2:64,*:76" "0:missing: 2"
                         "2:belongs to another job, or to another start or generation of the job")
ddp_add_rendezvous_fault(exhausted "exhausted" "*:76" "0:could not accept their connections: Too many open files"
                         "0:raise the limit with ulimit -n" "0:it slept meanwhile")
ddp_add_rendezvous_fault(raised "raised" "*:0")
ddp_add_rendezvous_fault(held "held" "*:0")

# The multi-rank main: a test that fails on one rank ends the run of all.
add_executable(failing_test comm/failing_test.cpp)
target_link_libraries(failing_test PRIVATE ddp ddp_warnings ddp_test_multi_rank_main)
ddp_use_pch(failing_test TEST)
ddp_add_launch(NAME multi_rank_failure PROGRAM failing_test RANKS 3 TIMEOUT 15
               OPTIONS --expect-exit "*:1" --expect-output "0:first cause: rank 1 ("
               --expect-output "0:in test case \"fails on rank 1 alone\"")

# torchrun is LibTorch's own launcher, where pip installed it.
get_filename_component(_torch_bin "${LIBTORCH_FOUND_ROOT}/../../../../bin" ABSOLUTE)
find_program(DDP_TORCHRUN torchrun HINTS "${_torch_bin}")
if(DDP_TORCHRUN)
  add_executable(torchrun_program comm/torchrun_program.cpp)
  target_link_libraries(torchrun_program PRIVATE ddp ddp_warnings)
  target_include_directories(torchrun_program PRIVATE ${PROJECT_SOURCE_DIR}/libddp/src)
  add_test(NAME torchrun_store COMMAND ${DDP_TORCHRUN} --no-python --standalone --nproc-per-node 3
           $<TARGET_FILE:torchrun_program>)
  set_tests_properties(torchrun_store PROPERTIES TIMEOUT 90
                       PASS_REGULAR_EXPRESSION "through the store: ranks 012, a stranger learns nothing")
endif()
