# SPDX-License-Identifier: Apache-2.0
# Trees of the layouts of pip, the zip and conda, made of links to the LibTorch this build uses; each is
# searched by the variable its users have set.
file(REMOVE_RECURSE ${WORK_DIR})

function(link_tree to)
  file(MAKE_DIRECTORY ${to})
  foreach(_part include lib share)
    file(CREATE_LINK ${LIBTORCH_ROOT}/${_part} ${to}/${_part} SYMBOLIC)
  endforeach()
endfunction()

# find(name folder|ERROR [MESSAGE text] [ENV VAR=value …] [ARGS cmake arguments …]): configures the small
# project in an environment that holds nothing else, and compares what was found.
function(find name expected)
  cmake_parse_arguments(arg "" "MESSAGE" "ENV;ARGS" ${ARGN})
  set(_environment --unset=LIBTORCH_ROOT --unset=VIRTUAL_ENV --unset=CONDA_PREFIX --unset=CMAKE_PREFIX_PATH)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env ${_environment} ${arg_ENV}
            ${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${WORK_DIR}/build_${name} -G ${GENERATOR}
            -DMODULE_DIR=${MODULE_DIR} ${arg_ARGS}
    RESULT_VARIABLE _result OUTPUT_VARIABLE _output ERROR_VARIABLE _output)
  if(expected STREQUAL "ERROR")
    string(REGEX REPLACE "[ \n]+" " " _line "${_output}")  # CMake wraps messages
    if(_result EQUAL 0 OR NOT _line MATCHES "${arg_MESSAGE}")
      message(FATAL_ERROR "${name}: expected the error \"${arg_MESSAGE}\", got (${_result})\n${_output}")
    endif()
    return()
  endif()
  if(NOT _result EQUAL 0)
    message(FATAL_ERROR "${name}: not found (${_result})\n${_output}")
  endif()
  file(READ ${WORK_DIR}/build_${name}/found.txt _found)
  if(NOT _found MATCHES "^${expected} [0-9]+\\.[0-9]+\\.[0-9]+$")
    message(FATAL_ERROR "${name}: expected ${expected}, found ${_found}")
  endif()
  # What tools/system_report.py reads of a build folder.
  file(STRINGS ${WORK_DIR}/build_${name}/CMakeCache.txt _used REGEX "^LIBTORCH_USED_(ROOT|VERSION):INTERNAL=")
  if(NOT _used MATCHES "ROOT:INTERNAL=${expected};.*VERSION:INTERNAL=[0-9]+\\.[0-9]+\\.[0-9]+$")
    message(FATAL_ERROR "${name}: the cache does not say which LibTorch was found: ${_used}")
  endif()
  message(STATUS "${name}: ${_found}")
endfunction()

link_tree(${WORK_DIR}/zip/libtorch)
link_tree(${WORK_DIR}/venv/lib/python3.11/site-packages/torch)
link_tree(${WORK_DIR}/conda/lib/python3.12/site-packages/torch)
# conda-forge puts headers and libraries into the environment's own include and lib.
set(_forge ${WORK_DIR}/conda_forge)
file(MAKE_DIRECTORY ${_forge}/include ${_forge}/lib/python3.12/site-packages)
file(GLOB _headers ${LIBTORCH_ROOT}/include/*)
file(GLOB _libraries ${LIBTORCH_ROOT}/lib/*.so*)
foreach(_file ${_headers})
  get_filename_component(_name ${_file} NAME)
  file(CREATE_LINK ${_file} ${_forge}/include/${_name} SYMBOLIC)
endforeach()
foreach(_file ${_libraries})
  get_filename_component(_name ${_file} NAME)
  file(CREATE_LINK ${_file} ${_forge}/lib/${_name} SYMBOLIC)
endforeach()

find(zip_by_environment ${WORK_DIR}/zip/libtorch ENV LIBTORCH_ROOT=${WORK_DIR}/zip/libtorch)
find(zip_by_cmake ${WORK_DIR}/zip/libtorch ARGS -DLIBTORCH_ROOT=${WORK_DIR}/zip/libtorch)
find(zip_by_prefix_path ${WORK_DIR}/zip/libtorch ARGS -DCMAKE_PREFIX_PATH=${WORK_DIR}/zip/libtorch)
find(pip_by_virtual_env ${WORK_DIR}/venv/lib/python3.11/site-packages/torch ENV VIRTUAL_ENV=${WORK_DIR}/venv)
find(pip_in_conda ${WORK_DIR}/conda/lib/python3.12/site-packages/torch ENV CONDA_PREFIX=${WORK_DIR}/conda)
find(conda_forge ${_forge} ENV CONDA_PREFIX=${_forge})
# An explicit choice beats the environment's.
find(root_before_conda ${WORK_DIR}/zip/libtorch
     ENV CONDA_PREFIX=${_forge} ARGS -DLIBTORCH_ROOT=${WORK_DIR}/zip/libtorch)
find(nowhere ERROR MESSAGE "set LIBTORCH_ROOT to the folder"
     ENV PATH=/nonexistent ARGS -DCMAKE_MAKE_PROGRAM=/bin/true)
# A mistyped choice is an error, also where another LibTorch would be found.
find(mistyped_root ERROR MESSAGE "LIBTORCH_ROOT is ${WORK_DIR}/zip/libtroch, which holds no LibTorch"
     ENV CONDA_PREFIX=${_forge} LIBTORCH_ROOT=${WORK_DIR}/zip/libtroch)
find(mistyped_root_by_cmake ERROR MESSAGE "LIBTORCH_ROOT is ${WORK_DIR}/zip/libtroch, which holds no LibTorch"
     ENV LIBTORCH_ROOT=${WORK_DIR}/zip/libtorch ARGS -DLIBTORCH_ROOT=${WORK_DIR}/zip/libtroch)

# A package without libddp's libraries: what find_package(ddp) itself does in a project of an older CMake.
include(CMakePackageConfigHelpers)
set(_package ${WORK_DIR}/package)
set(DDP_HAS_CUDA OFF)
set(DDP_LIBTORCH_SERIES "[0-9]+.[0-9]+")
set(CMAKE_INSTALL_PREFIX ${_package})
configure_package_config_file(${MODULE_DIR}/ddpConfig.cmake.in ${_package}/ddpConfig.cmake INSTALL_DESTINATION ${_package})
file(GLOB _modules ${MODULE_DIR}/Find*.cmake)
file(COPY ${_modules} ${MODULE_DIR}/DdpSharedPch.cmake ${MODULE_DIR}/pch.cpp DESTINATION ${_package})
file(WRITE ${_package}/include/torch/torch.h "#pragma once\n")
file(WRITE ${_package}/include/ddp/ddp.hpp "#pragma once\nnamespace ddp {\ninline int zero() { return 0; }\n}\n")
file(WRITE ${_package}/ddpTargets.cmake "if(NOT TARGET ddp::ddp)
  add_library(ddp::ddp INTERFACE IMPORTED)
  target_include_directories(ddp::ddp INTERFACE ${_package}/include)
  add_library(ddp::pch INTERFACE IMPORTED)
  target_link_libraries(ddp::pch INTERFACE ddp::ddp)
endif()
")
execute_process(
  COMMAND ${CMAKE_COMMAND} -S ${SOURCE_DIR}/user -B ${WORK_DIR}/build_user -G ${GENERATOR} -Dddp_DIR=${_package}
          -DLIBTORCH_ROOT=${WORK_DIR}/zip/libtorch
  RESULT_VARIABLE _result OUTPUT_VARIABLE _output ERROR_VARIABLE _output)
if(NOT _result EQUAL 0 OR _output MATCHES "[Ww]arning")
  message(FATAL_ERROR "find_package(ddp) with LIBTORCH_ROOT fails or warns (${_result}):\n${_output}")
endif()

# Targets that link ddp::pch share one precompiled header, as far as their flags agree. Their sources include nothing.
file(STRINGS ${WORK_DIR}/build_user/precompiled.txt _lines)
foreach(_line ${_lines})
  string(REGEX MATCH "^([a-z]+)=(.*)$" _line ${_line})
  set(_of_${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
endforeach()
if(NOT _of_first MATCHES "^ddp_pch_" OR NOT _of_second STREQUAL _of_first OR NOT _of_nested STREQUAL _of_first
   OR NOT _of_helpers STREQUAL _of_first OR NOT _of_indirect STREQUAL _of_first)
  message(FATAL_ERROR "targets of the same flags do not share a precompiled header: ${_lines}")
endif()
if(NOT _of_shared MATCHES "^ddp_pch_" OR NOT _of_defines MATCHES "^ddp_pch_" OR _of_shared STREQUAL _of_first
   OR _of_defines STREQUAL _of_first OR _of_defines STREQUAL _of_shared)
  message(FATAL_ERROR "targets of other flags share a precompiled header: ${_lines}")
endif()
if(NOT _of_lender STREQUAL "own" OR NOT _of_borrower STREQUAL "lender" OR NOT _of_without STREQUAL ""
   OR NOT _of_mixed STREQUAL "own" OR NOT _of_flagged STREQUAL "own")
  message(FATAL_ERROR "targets have another precompiled header than they ask for: ${_lines}")
endif()
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK_DIR}/build_user
                RESULT_VARIABLE _result OUTPUT_VARIABLE _output ERROR_VARIABLE _output)
file(GLOB_RECURSE _files ${WORK_DIR}/build_user/*.gch ${WORK_DIR}/build_user/*.pch)
list(LENGTH _files _num_files)
if(NOT _result EQUAL 0 OR NOT _num_files EQUAL 6)
  message(FATAL_ERROR "the project does not build (${_result}), or with ${_num_files} precompiled headers:\n${_output}")
endif()
