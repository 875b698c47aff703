# SPDX-License-Identifier: Apache-2.0
# ddp::run over several ranks: how all of them end.
add_executable(run_program run_program.cpp)
target_link_libraries(run_program PRIVATE ddp ddp_warnings)
ddp_use_pch(run_program TEST)
function(ddp_add_run name codes)
  set(_options --expect-exit ${codes})
  foreach(_text ${ARGN})
    list(APPEND _options --expect-output ${_text})
  endforeach()
  ddp_add_launch(NAME run_${name} PROGRAM run_program ARGUMENTS program.fault=${name} RANKS 3
                 TIMEOUT 20 OPTIONS ${_options})
endfunction()
ddp_add_run(none "*:0" "0:3 ranks on 1 node (mpirun), cpu, mpi")
ddp_add_run(throw "*:1" "0:first cause: rank 1 (" "0:at step 5 in forward: my bug")
ddp_add_run(blocked "*:65" "0:at step 5 in forward: shard 7 is truncated" "1:the barrier was aborted")
ddp_add_run(stop "*:75" "0:rank 1 received SIGUSR1: all ranks stop here")
ddp_add_run(settings "*:70"
  "0:rank 1 has other settings than rank 0: train.max_grad_norm=5 here, train.max_grad_norm=0 there")
