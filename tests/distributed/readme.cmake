# SPDX-License-Identifier: Apache-2.0
# README's own program, as its lines of a diff leave it: what begins with "-" goes, "+" and the first blank are cut.
set(_page ${PROJECT_SOURCE_DIR}/README.md)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${_page})
file(READ ${_page} _text)
if(NOT _text MATCHES "```diff\n(.*[^`])```\n\n```\nsource scripts/env.sh")
  message(FATAL_ERROR "README.md has no program in a block of diff, or no commands behind it")
endif()
string(REGEX REPLACE "\n-[^\n]*" "" _text "\n${CMAKE_MATCH_1}")
string(REGEX REPLACE "\n[+ ]" "\n" _text "${_text}")
set(_source ${CMAKE_CURRENT_BINARY_DIR}/readme_program.cpp)
file(CONFIGURE OUTPUT ${_source} CONTENT "${_text}" @ONLY)
add_executable(readme_program ${_source})
target_link_libraries(readme_program PRIVATE ddp ddp_warnings)
ddp_use_pch(readme_program TEST)
foreach(_ranks 1 2)
  ddp_add_example(readme_program readme_program ${_ranks} ARGUMENTS context.device=cpu)
endforeach()
# It reads no length of a run.
ddp_add_example(readme_program_length readme_program 1 ARGUMENTS context.device=cpu train.max_steps=5 EXIT 64
                OUTPUT "0:train.max_steps")
