# SPDX-License-Identifier: Apache-2.0
# Finds NCCL: first the one beside pip's LibTorch (the version LibTorch itself runs with), then NCCL_ROOT
# and the system. Defines NCCL::nccl.
find_path(NCCL_INCLUDE_DIR nccl.h
  HINTS "${LIBTORCH_NVIDIA_DIR}/nccl/include" "${NCCL_ROOT}/include" "$ENV{NCCL_ROOT}/include"
        ${CUDAToolkit_INCLUDE_DIRS})
find_library(NCCL_LIBRARY NAMES libnccl.so.2 nccl
  HINTS "${LIBTORCH_NVIDIA_DIR}/nccl/lib" "${NCCL_ROOT}/lib" "$ENV{NCCL_ROOT}/lib")
if(NCCL_INCLUDE_DIR)
  file(STRINGS "${NCCL_INCLUDE_DIR}/nccl.h" _lines REGEX "#define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE ".*NCCL_MAJOR +([0-9]+).*" "\\1" _major "${_lines}")
  string(REGEX REPLACE ".*NCCL_MINOR +([0-9]+).*" "\\1" _minor "${_lines}")
  string(REGEX REPLACE ".*NCCL_PATCH +([0-9]+).*" "\\1" _patch "${_lines}")
  set(NCCL_VERSION "${_major}.${_minor}.${_patch}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR
                                  VERSION_VAR NCCL_VERSION)
if(NCCL_FOUND AND NOT TARGET NCCL::nccl)
  add_library(NCCL::nccl UNKNOWN IMPORTED)
  set_target_properties(NCCL::nccl PROPERTIES
    IMPORTED_LOCATION "${NCCL_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${NCCL_INCLUDE_DIR}"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${NCCL_INCLUDE_DIR}")
endif()
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
