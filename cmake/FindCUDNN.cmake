# SPDX-License-Identifier: Apache-2.0
# Finds cuDNN: first the one beside pip's LibTorch (the version LibTorch itself runs with), then
# CUDNN_ROOT and the system. Defines CUDNN::cudnn.
find_path(CUDNN_INCLUDE_DIR cudnn_backend.h
  HINTS "${LIBTORCH_NVIDIA_DIR}/cudnn/include" "${CUDNN_ROOT}/include" "$ENV{CUDNN_ROOT}/include"
        ${CUDAToolkit_INCLUDE_DIRS})
find_library(CUDNN_LIBRARY NAMES libcudnn.so.9 cudnn
  HINTS "${LIBTORCH_NVIDIA_DIR}/cudnn/lib" "${CUDNN_ROOT}/lib" "$ENV{CUDNN_ROOT}/lib")
if(EXISTS "${CUDNN_INCLUDE_DIR}/cudnn_version.h")
  file(STRINGS "${CUDNN_INCLUDE_DIR}/cudnn_version.h" _lines REGEX "#define CUDNN_(MAJOR|MINOR|PATCHLEVEL) ")
  string(REGEX REPLACE ".*CUDNN_MAJOR +([0-9]+).*" "\\1" _major "${_lines}")
  string(REGEX REPLACE ".*CUDNN_MINOR +([0-9]+).*" "\\1" _minor "${_lines}")
  string(REGEX REPLACE ".*CUDNN_PATCHLEVEL +([0-9]+).*" "\\1" _patch "${_lines}")
  set(CUDNN_VERSION "${_major}.${_minor}.${_patch}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CUDNN REQUIRED_VARS CUDNN_LIBRARY CUDNN_INCLUDE_DIR
                                  VERSION_VAR CUDNN_VERSION)
if(CUDNN_FOUND AND NOT TARGET CUDNN::cudnn)
  add_library(CUDNN::cudnn UNKNOWN IMPORTED)
  set_target_properties(CUDNN::cudnn PROPERTIES
    IMPORTED_LOCATION "${CUDNN_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${CUDNN_INCLUDE_DIR}"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${CUDNN_INCLUDE_DIR}")
endif()
mark_as_advanced(CUDNN_INCLUDE_DIR CUDNN_LIBRARY)
