# SPDX-License-Identifier: Apache-2.0
# Checkpoints of ZeRO-1 and Muon, saved and loaded by different numbers of ranks.
find_package(Python3 QUIET COMPONENTS Interpreter)
add_executable(zero_checkpoint_program optim/zero_checkpoint_program.cpp)
target_link_libraries(zero_checkpoint_program PRIVATE ddp ddp_warnings)
ddp_use_pch(zero_checkpoint_program TEST)
add_dependencies(zero_checkpoint_program ddp_test_launch)
if(Python3_FOUND AND DDP_HAS_MPI)
  foreach(_scenario reshard memory damage muon)
    set(_test zero_checkpoint_${_scenario})
    add_test(NAME ${_test} COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/optim/zero_checkpoint_test.py
             ${_scenario} $<TARGET_FILE:ddp_test_launch> $<TARGET_FILE:zero_checkpoint_program>)
    set_tests_properties(${_test} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 240
                         ENVIRONMENT "PYTHONDONTWRITEBYTECODE=1")
    ddp_set_ranks(${_test} 4)
  endforeach()
endif()
