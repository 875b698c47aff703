# SPDX-License-Identifier: Apache-2.0
# The trainer as a user runs it.
if(TARGET resnet_ddp)
  foreach(_case mnist:1 small:1 small:2 uses:1 uses:2 learns:1 learns:2 learns:4 accumulates:2 finishes:1 finishes:2 refuses:2 unsaved:1 unsaved:2 skips:2 diverges:1 diverges:2 protects:1 protects:2 resumes:1 resumes:2 stops:2 evaluates:1 evaluates:2 averages:2)
    string(REPLACE ":" ";" _case ${_case})
    list(GET _case 0 _scenario)
    list(GET _case 1 _ranks)
    if(_ranks EQUAL 1 OR DDP_HAS_MPI)
      set(_test resnet_ddp_${_scenario}_r${_ranks})
      add_test(NAME ${_test} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/resnet_ddp_test.sh ${_scenario}
               $<TARGET_FILE:resnet_ddp> ${_ranks} ${PROJECT_SOURCE_DIR}/data/cifar10-sample)
      set_tests_properties(${_test} PROPERTIES TIMEOUT 180)
      ddp_set_ranks(${_test} ${_ranks})
      if(_test STREQUAL resnet_ddp_protects_r2)
        set_tests_properties(${_test} PROPERTIES LABELS slow)
      endif()
    endif()
  endforeach()
endif()
