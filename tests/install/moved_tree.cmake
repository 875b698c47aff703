# SPDX-License-Identifier: Apache-2.0
# Installs into one folder, renames it, and builds the outside project against the renamed one.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE _result OUTPUT_VARIABLE _output ERROR_VARIABLE _output)
  if(NOT _result EQUAL 0)
    message(FATAL_ERROR "failed (${_result}): ${ARGN}\n${_output}")
  endif()
  set(output "${_output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/first)
file(RENAME ${WORK_DIR}/first ${WORK_DIR}/moved)

# Nothing installed may remember the build tree or the folder of the first installation.
file(GLOB_RECURSE _texts ${WORK_DIR}/moved/*.cmake ${WORK_DIR}/moved/*.pc)
foreach(_file ${_texts})
  file(READ ${_file} _text)
  foreach(_path ${BUILD_DIR}/lib ${WORK_DIR}/first)
    string(FIND "${_text}" "${_path}" _at)
    if(NOT _at EQUAL -1)
      message(FATAL_ERROR "${_file} holds ${_path}")
    endif()
  endforeach()
endforeach()

# Libraries of others that travel along bring their licence.
file(GLOB _bundled ${WORK_DIR}/moved/${LIBDIR}/libyaml-cpp* ${WORK_DIR}/moved/${LIBDIR}/libturbojpeg*
     ${WORK_DIR}/moved/${LIBDIR}/libpng* ${WORK_DIR}/moved/${LIBDIR}/libwebp*
     ${WORK_DIR}/moved/${LIBDIR}/libsharpyuv*)
file(GLOB _licences ${WORK_DIR}/moved/share/doc/*/licences/*.txt)
list(LENGTH _bundled _num_bundled)
list(LENGTH _licences _num_licences)
if(EXISTS /etc/debian_version AND NOT _num_bundled EQUAL _num_licences)
  message(FATAL_ERROR "${_num_bundled} bundled libraries, but ${_num_licences} licences: ${_licences}")
endif()

set(_launcher "")
if(LAUNCHER)
  set(_launcher "-DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}")
endif()
set(ENV{LIBTORCH_ROOT} ${LIBTORCH_ROOT})
run(${CMAKE_COMMAND} -S ${SOURCE_DIR}/consumer -B ${WORK_DIR}/build -G ${GENERATOR}
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK_DIR}/moved -DCMAKE_CXX_COMPILER=${CXX} ${_launcher})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
file(GLOB_RECURSE _precompiled ${WORK_DIR}/build/*.gch ${WORK_DIR}/build/*.pch)
if(NOT _precompiled)
  message(FATAL_ERROR "ddp::pch precompiled no header")
endif()
run(${WORK_DIR}/build/consumer)
message(STATUS "consumer says: ${output}")

# Its own training program takes the settings that it uses, and refuses those that change nothing.
set(_train ${WORK_DIR}/build/consumer context.device=cpu train.max_steps=3)
run(${_train} train.batch_size=4 ddp.bucket_cap_mb=1 optimizer.momentum=0.9 lr_schedule.lr=0.01)
foreach(_unused train.grad_accum_steps=4 train.max_grad_norm=1 data.num_samples=80 sampler.seed=1
                loader.num_workers=1 amp.dtype=bf16 metrics.log_every=1 checkpoint.every_steps=1)
  execute_process(COMMAND ${_train} ${_unused} RESULT_VARIABLE _result OUTPUT_VARIABLE _output ERROR_VARIABLE _output)
  string(FIND "${_output}" "${_unused} has no effect" _at)
  if(NOT _result EQUAL 64 OR _at EQUAL -1 OR _output MATCHES "step 1")
    message(FATAL_ERROR "${_unused} was not refused (${_result}):\n${_output}")
  endif()
endforeach()

# The installed libraries come from the moved folder.
run(ldd ${WORK_DIR}/build/consumer)
string(FIND "${output}" "${WORK_DIR}/moved/${LIBDIR}/libddp.so" _at)
if(_at EQUAL -1)
  message(FATAL_ERROR "the consumer does not load libddp from the moved tree:\n${output}")
endif()
if(output MATCHES "not found")
  message(FATAL_ERROR "a library is missing:\n${output}")
endif()

find_program(_pkg_config pkg-config)
if(_pkg_config)
  set(ENV{PKG_CONFIG_PATH} ${WORK_DIR}/moved/${LIBDIR}/pkgconfig)
  run(${_pkg_config} --cflags --libs ddp)
  string(STRIP "${output}" _flags)
  separate_arguments(_flags UNIX_COMMAND "${_flags}")
  run(${CXX} ${SOURCE_DIR}/consumer/pkg_config.cpp -o ${WORK_DIR}/pkg_config ${_flags})
  run(${WORK_DIR}/pkg_config)
  message(STATUS "pkg-config program says: ${output}")
else()
  message(STATUS "pkg-config is not installed: ddp.pc was not tried")
endif()
