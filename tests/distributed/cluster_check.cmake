# SPDX-License-Identifier: Apache-2.0
# cluster_check as a user runs it. Its target follows later, from tools/.
foreach(_case full:1 full:4 quick:2 fails:1 fails:2 thresholds:2 refuses:1)
  string(REPLACE ":" ";" _case ${_case})
  list(GET _case 0 _scenario)
  list(GET _case 1 _ranks)
  if(_ranks EQUAL 1 OR DDP_HAS_MPI)
    set(_test cluster_check_${_scenario}_r${_ranks})
    add_test(NAME ${_test} COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cluster_check_test.py ${_scenario}
             $<TARGET_FILE:ddp_test_launch> $<TARGET_FILE:cluster_check> ${_ranks})
    set_tests_properties(${_test} PROPERTIES TIMEOUT 240 SKIP_RETURN_CODE 77)
    ddp_set_ranks(${_test} ${_ranks})
  endif()
endforeach()
if(DDP_HAS_CUDA)
  add_test(NAME gpu_cluster_check COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cluster_check_test.py gpu
           $<TARGET_FILE:ddp_test_launch> $<TARGET_FILE:cluster_check> 1)
  set_tests_properties(gpu_cluster_check PROPERTIES TIMEOUT 240 SKIP_RETURN_CODE 77 LABELS gpu RESOURCE_LOCK gpu)
endif()
