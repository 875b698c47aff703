# SPDX-License-Identifier: Apache-2.0
# The trainer of Vision Transformers as a user runs it.
if(TARGET vit_ddp)
  foreach(_case learns:2 curve:4 uses:2 resumes:1 resumes:2 refuses:1)
    string(REPLACE ":" ";" _case ${_case})
    list(GET _case 0 _scenario)
    list(GET _case 1 _ranks)
    if(_ranks EQUAL 1 OR DDP_HAS_MPI)
      set(_test vit_ddp_${_scenario}_r${_ranks})
      add_test(NAME ${_test} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/vit_ddp_test.sh ${_scenario}
               $<TARGET_FILE:vit_ddp> ${_ranks} ${PROJECT_SOURCE_DIR}/data/cifar10-sample)
      set_tests_properties(${_test} PROPERTIES TIMEOUT 180)
      ddp_set_ranks(${_test} ${_ranks})
    endif()
  endforeach()
endif()
