# SPDX-License-Identifier: Apache-2.0
# ddp::run over several ranks: how all of them end.
add_executable(run_program comm/run_program.cpp)
target_link_libraries(run_program PRIVATE ddp ddp_warnings)
target_include_directories(run_program PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/libddp/src)
ddp_use_pch(run_program TEST)
function(ddp_add_run name codes)
  set(_options --expect-exit ${codes})
  foreach(_text ${ARGN})
    list(APPEND _options --expect-output ${_text})
  endforeach()
  ddp_add_launch(NAME run_${name} PROGRAM run_program ARGUMENTS program.fault=${name} RANKS 3
                 TIMEOUT 20 OPTIONS ${_options} UNHURRIED)
endfunction()
ddp_add_run(none "*:0" "0:3 ranks on 1 node (mpirun), cpu, mpi")
ddp_add_run(throw "*:1" "0:first cause: rank 1 (" "0:at step 5 in forward: my bug")
ddp_add_run(blocked "*:65" "0:at step 5 in forward: shard 7 is truncated" "1:the barrier was aborted")
ddp_add_run(stop "*:75" "0:stopped after step 5")
# The rank without its GPU reports it to the others, which would otherwise wait for it.
ddp_add_run(lost_gpu "*:64" "0:rank 1 (" "0:finds no usable GPU on" "0:CUDA_VISIBLE_DEVICES is set (7777)" "2:finds no usable GPU on")
ddp_add_run(loads "*:75" "0:a stop was requested, and there is nothing to save yet")
ddp_add_launch(NAME run_after_save PROGRAM run_program ARGUMENTS program.fault=after_save RANKS 2 TIMEOUT 20 UNHURRIED
               OPTIONS --expect-exit "*:65" --expect-output "0:the copy failed"
                       --expect-output "0:before the stop: 0 steps" --expect-output "1:before the stop: 0 steps")
ddp_add_run(settings "*:70"
  "0:rank 1 has other settings than rank 0: train.max_grad_norm=5 here, train.max_grad_norm=0 there")

# Ranks that wait for each other, for ever and not. FAULT_checked is FAULT with check_collectives.
add_executable(wait_program comm/wait_program.cpp)
target_link_libraries(wait_program PRIVATE ddp ddp_warnings)
target_include_directories(wait_program PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/libddp/src)
ddp_use_pch(wait_program TEST)
function(ddp_add_wait name codes arguments)
  string(REGEX REPLACE "_checked$" "" _fault ${name})
  if(NOT _fault STREQUAL name)
    list(APPEND arguments context.communicator.check_collectives=true)
  endif()
  set(_options --expect-exit ${codes})
  foreach(_text ${ARGN})
    list(APPEND _options --expect-output ${_text})
  endforeach()
  ddp_add_launch(NAME wait_${name} PROGRAM wait_program ARGUMENTS program.fault=${_fault} ${arguments}
                 RANKS 3 TIMEOUT 30 OPTIONS ${_options})
endfunction()
ddp_add_wait(uneven "*:70" "" "0:first cause: rank 1 (" "0: left at step 2 in forward" "0: waits at step 3 in forward in all_reduce #"
             "0:heard in time" "0:left in time" "1:left in time")
ddp_add_wait(stop "*:70" "" "0:first cause: rank 1 (" "0: left at step 2 in forward" "0:heard in time" "0:left in time" "1:left in time")
ddp_add_wait(plane "*:70" "" "0:ranks diverged: rank 0 (" "0: in the control plane's all_gather after"
             "0: waits at step 4 in forward in all_reduce #" "0:heard in time" "0:left in time" "1:left in time")
ddp_add_wait(save "*:70" "" "0:in the control plane's broadcast (root 0) of 'save' after" "0:heard in time" "0:left in time" "1:left in time")
ddp_add_wait(operation "*:70" "" "0:ranks diverged" "0:in barrier #" "0:in all_reduce #" "0:heard in time" "0:left in time" "1:left in time")
ddp_add_wait(backward "*:70" "" "0:rank 1 (" "0:in the control plane's all_gather after" "0:at step 4 in forward in all_reduce #"
             "0:heard in time" "0:left in time" "1:left in time")
ddp_add_wait(frozen "*:70" "" "0:rank 1 (" "0:in the control plane's all_gather of 'requires_grad of bias' after"
             "0:at step 3 in forward in all_reduce #" "0:heard in time" "0:left in time" "1:left in time")
ddp_add_wait(gradient_checked "*:70" "" "0: differs: rank 0 called reduce_scatter (sum of 24 Float), rank 1 called all_gather (24 Float);"
             "0:left in time" "1:left in time")
ddp_add_wait(thrown "*:1" "" "0:first cause: rank 1 (" "0:at step 3 in forward: my loss is wrong" "0:heard in time"
             "0:left in time" "2:left in time")
ddp_add_wait(places "*:0" "" "0:caught at step 3" "1:caught at step 3" "0:left in time")
ddp_add_wait(uneven_checked "*:70" "" "0:first cause: rank 1 (" "0: left at step 2 in forward"
             "0: waits at step 3 in forward in the check of all_reduce #4 (sum of 100 Float)"
             "0:heard in time" "0:left in time" "1:left in time")
ddp_add_wait(plane_checked "*:70" "" "0:ranks diverged: rank 0 (" "0: in the control plane's all_gather after"
             "0: waits at step 4 in forward in the check of all_reduce #" "0:heard in time" "0:left in time" "1:left in time")
ddp_add_wait(backward_checked "*:70" "" "0:rank 1 (" "0: in the control plane's all_gather after"
             "0:at step 4 in forward in the check of all_reduce #" "0:heard in time" "0:left in time" "1:left in time")
ddp_add_wait(places_checked "*:70" "" "0:rank 1 (" "0: waits at step 4 in forward in the control plane's all_gather after"
             "0: waits at step 3 in forward in the check of all_reduce #" "0:heard in time" "0:left in time" "1:left in time")
# Positions are looked at every 20 ms.
foreach(_name none none_checked)
  ddp_add_wait(${_name} "*:0" "context.control_plane.heartbeat_interval_ms=200;context.control_plane.heartbeat_misses=100" "")
endforeach()
if(DDP_HAS_CUDA)  # by what NCCL's counters tell
  ddp_add_launch(NAME gpu_wait_uneven PROGRAM wait_program ARGUMENTS program.fault=uneven RANKS 2 TIMEOUT 60 LABELS gpu
                 OPTIONS --expect-exit "*:70" --expect-output "0: left at step 2 in forward"
                         --expect-output "0:in all_reduce #" --expect-output "0:heard in time")
  ddp_add_launch(NAME gpu_wait_uneven_checked PROGRAM wait_program
                 ARGUMENTS program.fault=uneven context.communicator.check_collectives=true RANKS 2 TIMEOUT 60 LABELS gpu
                 OPTIONS --expect-exit "*:70" --expect-output "0: left at step 2 in forward"
                         --expect-output "0:in the check of all_reduce #" --expect-output "0:heard in time")
endif()
