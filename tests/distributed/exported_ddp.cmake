# SPDX-License-Identifier: Apache-2.0
# The trainer of exported models as a user runs it.
find_package(Python3 QUIET COMPONENTS Interpreter)
if(TARGET exported_ddp)
  foreach(_case learns:2 resumes:1 resumes:2 refuses:1)
    string(REPLACE ":" ";" _case ${_case})
    list(GET _case 0 _scenario)
    list(GET _case 1 _ranks)
    if(_ranks EQUAL 1 OR DDP_HAS_MPI)
      set(_test exported_ddp_${_scenario}_r${_ranks})
      add_test(NAME ${_test} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/exported_ddp_test.sh ${_scenario}
               $<TARGET_FILE:exported_ddp> ${_ranks} ${PROJECT_SOURCE_DIR}/data)
      set_tests_properties(${_test} PROPERTIES TIMEOUT 180)
      ddp_set_ranks(${_test} ${_ranks})
    endif()
  endforeach()
  # From archives that the test makes in Python, on this many ranks at most.
  foreach(_ranks 1 4)
    if(Python3_FOUND AND (_ranks EQUAL 1 OR DDP_HAS_MPI))
      set(_test exported_ddp_python_r${_ranks})
      add_test(NAME ${_test} COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/exported_ddp_test.py
               $<TARGET_FILE:exported_ddp> ${_ranks})
      set_tests_properties(${_test} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 240
                           ENVIRONMENT "PYTHONDONTWRITEBYTECODE=1")
      ddp_set_ranks(${_test} ${_ranks})
    endif()
  endforeach()
  # The matrix of docs/exported_results.md. One process for all kinds: starting Python and its first export take longer
  # than the runs of a kind.
  foreach(_ranks 1 2)
    if(Python3_FOUND AND (_ranks EQUAL 1 OR DDP_HAS_MPI))
      set(_test exported_matrix_r${_ranks})
      add_test(NAME ${_test} COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/exported_matrix_test.py
               $<TARGET_FILE:exported_ddp> ${_ranks} images pixels in_graph language adapters)
      set_tests_properties(${_test} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300
                           ENVIRONMENT "PYTHONDONTWRITEBYTECODE=1")
      ddp_set_ranks(${_test} ${_ranks})
    endif()
  endforeach()
endif()
