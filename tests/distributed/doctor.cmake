# SPDX-License-Identifier: Apache-2.0
# What the hang doctor says of ranks that wait for one another.
add_executable(doctor_program comm/doctor_program.cpp)
target_link_libraries(doctor_program PRIVATE ddp ddp_warnings)
target_include_directories(doctor_program PRIVATE ${PROJECT_SOURCE_DIR}/tests)
ddp_use_pch(doctor_program TEST)
# ddp_add_doctor(fault exit-codes arguments expected-output…)
function(ddp_add_doctor fault codes arguments)
  set(_options --expect-exit ${codes})
  foreach(_text ${ARGN})
    list(APPEND _options --expect-output ${_text})
  endforeach()
  ddp_add_launch(NAME doctor_${fault} PROGRAM doctor_program
                 ARGUMENTS program.fault=${fault} metrics.dir= ${arguments}
                 RANKS 3 TIMEOUT 60 OPTIONS ${_options})
endfunction()
set(_soon "context.communicator.timeout_ms=3000;context.communicator.first_step_timeout_ms=20000")
ddp_add_doctor(loader "*:76" "${_soon}" "0:doctor: rank 1 (" "0: did not enter all_reduce #" "0: bucket 0: "
               "0: it waits at step " "0: in the loader for batch " "0: ranks 0, 2 wait since ")
ddp_add_doctor(computes "*:76" "${_soon}" "0:doctor: rank 1 (" "0: it computes at step " "0: in code after backward (")
ddp_add_doctor(sleeps "*:76" "${_soon}" "0:doctor: rank 1 (" "0: it is at step " "0: in code after backward (")
ddp_add_doctor(freezes "*:76" "context.control_plane.heartbeat_interval_ms=300" "0:first cause: rank 1 ("
               "0:doctor: rank 1 (" "0: is stopped by SIGSTOP (`kill -CONT " "0: ranks 0, 2 wait since ")
ddp_add_doctor(size "*:70" "" "0:first cause: " "0:doctor: rank 0 (" "0: call one operation with different sizes, dtypes or roots: "
               "0: (sum of 10 Float" "0: (sum of 20 Float")
ddp_add_doctor(asked "*:0" "" "0:doctor: rank 1 (" "0: did not enter all_reduce #" "0: bucket 0: "
               "0: ranks 0, 2 wait since " "0: called, in all_reduce #")
if(Python3_FOUND AND DDP_HAS_MPI)  # a live run, and the folder of one that failed
  add_test(NAME doctor_ddp_top COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/comm/doctor_test.py
           $<TARGET_FILE:ddp_test_launch> $<TARGET_FILE:doctor_program>)
  set_tests_properties(doctor_ddp_top PROPERTIES TIMEOUT 120 ENVIRONMENT "PYTHONDONTWRITEBYTECODE=1")
  ddp_set_ranks(doctor_ddp_top 3)
endif()
if(DDP_HAS_CUDA)  # by what NCCL's counters tell, eager and captured
  function(ddp_add_gpu_doctor name arguments)
    set(_options --expect-exit "*:76" --expect-output "0:doctor: rank 1 (" --expect-output "0: did not enter all_reduce #"
        --expect-output "0: bucket 0: " --expect-output "0: rank 0 waits since ")
    foreach(_text ${ARGN})
      list(APPEND _options --expect-output ${_text})
    endforeach()
    ddp_add_launch(NAME gpu_doctor_${name} PROGRAM doctor_program ARGUMENTS metrics.dir= program.step=12 ${_soon} ${arguments}
                   RANKS 2 TIMEOUT 90 LABELS gpu OPTIONS ${_options})
  endfunction()
  ddp_add_gpu_doctor(eager "program.fault=sleeps;train.cuda_graph=off" "0: it is at step ")
  ddp_add_gpu_doctor(captured "program.fault=sleeps;train.cuda_graph=on" "0: of CUDA graph 0, replay "
                      "0: in code after a replayed step (")
  ddp_add_gpu_doctor(loader "program.fault=loader;train.cuda_graph=off" "0: in the loader for batch ")
endif()
