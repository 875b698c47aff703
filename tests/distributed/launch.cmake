# SPDX-License-Identifier: Apache-2.0
# The launcher itself, with shell commands as ranks: it must see what goes wrong. The text it prints
# is matched, since a launcher that fails for another reason would pass by its exit code alone.
function(ddp_add_launcher_test name text)
  add_test(NAME launch_${name} COMMAND ddp_test_launch ${ARGN})
  set_tests_properties(launch_${name} PROPERTIES TIMEOUT 60 PASS_REGULAR_EXPRESSION "${text}")
endfunction()
find_program(DDP_SHELL sh REQUIRED)
set(_rank "rank=\${OMPI_COMM_WORLD_RANK:-$RANK}")
foreach(_mode env mpi)
  if(_mode STREQUAL "mpi" AND NOT DDP_HAS_MPI)
    continue()
  endif()
  ddp_add_launcher_test(${_mode}_sees_an_exit_code "rank 2: exit code 3, expected 0"
    --launch ${_mode} --ranks 3 -- ${DDP_SHELL} -c "${_rank}\; test $rank != 2 || exit 3")
  ddp_add_launcher_test(${_mode}_sees_a_signal "rank 1: exit code 137 .Killed., expected 0"
    --launch ${_mode} --ranks 2 -- ${DDP_SHELL} -c "${_rank}\; test $rank != 1 || kill -9 $$")
  ddp_add_launcher_test(${_mode}_lets_survivors_speak "^$"
    --launch ${_mode} --ranks 2 --expect-exit "1:137,0:76" --expect-output "0:survived"
    -- ${DDP_SHELL} -c "${_rank}\; test $rank != 1 || kill -9 $$\; sleep 3\; echo survived\; exit 76")
  ddp_add_launcher_test(${_mode}_ends_what_hangs "not ended within 1 s.*rank 1: did not end by itself"
    --launch ${_mode} --ranks 2 --timeout 1 -- ${DDP_SHELL} -c "${_rank}\; test $rank = 0 || sleep 50")
endforeach()
ddp_add_launcher_test(ends_survivors_after_a_failure "not ended within 1 s after the first failure"
  --launch env --ranks 2 --grace 1 -- ${DDP_SHELL} -c "test $RANK = 0 || exit 1\; sleep 50")
ddp_add_launcher_test(finds_leftovers "a process outlived the ranks: sleep 50"
  --launch env --ranks 1 -- ${DDP_SHELL} -c "sleep 50 & exit 0")
ddp_add_launcher_test(misses_an_output "rank 0 did not print .hello."
  --launch env --ranks 1 --expect-output "0:hello" -- ${DDP_SHELL} -c "echo goodbye")
ddp_add_launcher_test(skips "skipped: a rank ended with 77"
  --launch env --ranks 2 -- ${DDP_SHELL} -c "exit 77")
ddp_add_launcher_test(skips_on_request "skipped: not today"
  --ranks 2 --skip "not today" -- ${DDP_SHELL} -c "echo started\; exit 1")
ddp_add_launcher_test(refuses_to_skip_on_request "DDP_REQUIRE_GPUS=1, but not today"
  --gpus --ranks 1 --skip "not today" -- true)
set_tests_properties(launch_refuses_to_skip_on_request PROPERTIES ENVIRONMENT DDP_REQUIRE_GPUS=1)
ddp_add_launcher_test(refuses_to_skip "DDP_REQUIRE_GPUS=64, but 64 GPUs are needed"
  --gpus --ranks 64 -- true)
set_tests_properties(launch_refuses_to_skip PROPERTIES ENVIRONMENT DDP_REQUIRE_GPUS=64)
