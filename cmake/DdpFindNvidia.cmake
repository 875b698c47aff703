# SPDX-License-Identifier: Apache-2.0
# ddp_find_nvidia(NAME FOLDER HEADER VERSION_HEADER PATCH LIBRARY...): the body of FindNAME for a library
# of NVIDIA's that pip's LibTorch brings. Looks beside LibTorch first (the version LibTorch itself runs
# with), in FOLDER, then in NAME_ROOT and the system. The version is that of the macros NAME_MAJOR,
# NAME_MINOR and NAME_PATCH (what PATCH says) in VERSION_HEADER. Defines NAME::FOLDER.
include(FindPackageHandleStandardArgs)

macro(ddp_find_nvidia NAME FOLDER HEADER VERSION_HEADER PATCH)
  find_path(${NAME}_INCLUDE_DIR ${HEADER}
    HINTS "${LIBTORCH_NVIDIA_DIR}/${FOLDER}/include" "${${NAME}_ROOT}/include" "$ENV{${NAME}_ROOT}/include"
          ${CUDAToolkit_INCLUDE_DIRS})
  find_library(${NAME}_LIBRARY NAMES ${ARGN}
    HINTS "${LIBTORCH_NVIDIA_DIR}/${FOLDER}/lib" "${${NAME}_ROOT}/lib" "$ENV{${NAME}_ROOT}/lib")
  if(EXISTS "${${NAME}_INCLUDE_DIR}/${VERSION_HEADER}")
    file(STRINGS "${${NAME}_INCLUDE_DIR}/${VERSION_HEADER}" _lines REGEX "#define ${NAME}_(MAJOR|MINOR|${PATCH}) ")
    string(REGEX REPLACE ".*${NAME}_MAJOR +([0-9]+).*" "\\1" _major "${_lines}")
    string(REGEX REPLACE ".*${NAME}_MINOR +([0-9]+).*" "\\1" _minor "${_lines}")
    string(REGEX REPLACE ".*${NAME}_${PATCH} +([0-9]+).*" "\\1" _patch "${_lines}")
    set(${NAME}_VERSION "${_major}.${_minor}.${_patch}")
  endif()
  find_package_handle_standard_args(${NAME} REQUIRED_VARS ${NAME}_LIBRARY ${NAME}_INCLUDE_DIR
                                    VERSION_VAR ${NAME}_VERSION)
  if(${NAME}_FOUND AND NOT TARGET ${NAME}::${FOLDER})
    add_library(${NAME}::${FOLDER} UNKNOWN IMPORTED)
    set_target_properties(${NAME}::${FOLDER} PROPERTIES
      IMPORTED_LOCATION "${${NAME}_LIBRARY}"
      INTERFACE_INCLUDE_DIRECTORIES "${${NAME}_INCLUDE_DIR}"
      INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${${NAME}_INCLUDE_DIR}")
  endif()
  mark_as_advanced(${NAME}_INCLUDE_DIR ${NAME}_LIBRARY)
endmacro()
