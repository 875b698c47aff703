# SPDX-License-Identifier: Apache-2.0
# Finds LibTorch as pip's package, an unpacked zip or a conda environment, and defines
#   ddp::torch_cpu    libtorch_cpu and libc10
#   ddp::torch_cuda   the same and libtorch_cuda, libc10_cuda (only where they exist)
#
# LibTorch's own TorchConfig.cmake is not used: with a CUDA build of LibTorch it demands a CUDA
# toolkit and probes the GPU even when nothing of CUDA is compiled here.
#
# Searched in this order; the first that has headers and libraries is taken:
#   LIBTORCH_ROOT (CMake, else environment); where it is set, nothing else is searched,
#   CMAKE_PREFIX_PATH, $VIRTUAL_ENV, .venv beside the project, $CONDA_PREFIX, then whatever `python3`
#   imports as torch.

set(_roots)
macro(_ddp_add_torch_roots base)
  foreach(_base ${base})
    list(APPEND _roots "${_base}")
    file(GLOB _site LIST_DIRECTORIES true "${_base}/lib/python3*/site-packages/torch")
    list(APPEND _roots ${_site})
  endforeach()
endmacro()

set(_explicit "${LIBTORCH_ROOT}")
if(NOT _explicit)
  set(_explicit "$ENV{LIBTORCH_ROOT}")
endif()
if(_explicit)
  _ddp_add_torch_roots("${_explicit}")
else()
  _ddp_add_torch_roots("${CMAKE_PREFIX_PATH}")
  _ddp_add_torch_roots("$ENV{VIRTUAL_ENV}")
  _ddp_add_torch_roots("${PROJECT_SOURCE_DIR}/.venv")
  _ddp_add_torch_roots("$ENV{CONDA_PREFIX}")
endif()

function(_ddp_check_torch_root root)
  # pip and zip: ROOT/include and ROOT/lib. conda: ROOT/include beside ROOT/lib of the environment.
  if(EXISTS "${root}/lib/libtorch_cpu.so" AND
     EXISTS "${root}/include/torch/csrc/api/include/torch/version.h")
    set(LIBTORCH_FOUND_ROOT "${root}" PARENT_SCOPE)
  endif()
endfunction()

foreach(_root ${_roots})
  if(NOT LIBTORCH_FOUND_ROOT)
    _ddp_check_torch_root("${_root}")
  endif()
endforeach()

if(NOT LIBTORCH_FOUND_ROOT AND NOT _explicit)
  find_program(_ddp_python NAMES python3 python)
  if(_ddp_python)
    execute_process(
      COMMAND "${_ddp_python}" -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE _torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(_torch_dir)
      _ddp_check_torch_root("${_torch_dir}")
    endif()
  endif()
endif()

if(LIBTORCH_FOUND_ROOT)
  set(LIBTORCH_INCLUDE_DIRS "${LIBTORCH_FOUND_ROOT}/include"
      "${LIBTORCH_FOUND_ROOT}/include/torch/csrc/api/include")
  file(STRINGS "${LIBTORCH_FOUND_ROOT}/include/torch/csrc/api/include/torch/version.h" _lines
       REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH)")
  # 2.11 moved the macros into torch/headeronly.
  if(NOT _lines AND EXISTS "${LIBTORCH_FOUND_ROOT}/include/torch/headeronly/version.h")
    file(STRINGS "${LIBTORCH_FOUND_ROOT}/include/torch/headeronly/version.h" _lines
         REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH)")
  endif()
  string(REGEX REPLACE ".*MAJOR ([0-9]+).*" "\\1" _major "${_lines}")
  string(REGEX REPLACE ".*MINOR ([0-9]+).*" "\\1" _minor "${_lines}")
  string(REGEX REPLACE ".*PATCH ([0-9]+).*" "\\1" _patch "${_lines}")
  set(LIBTORCH_VERSION "${_major}.${_minor}.${_patch}")
  set(LIBTORCH_LIBRARY_DIR "${LIBTORCH_FOUND_ROOT}/lib")
  # pip keeps CUDA's libraries beside torch, in site-packages/nvidia.
  get_filename_component(LIBTORCH_NVIDIA_DIR "${LIBTORCH_FOUND_ROOT}/../nvidia" ABSOLUTE)
  # Not searched: for those who look at a build folder (tools/system_report.py).
  set(LIBTORCH_USED_ROOT "${LIBTORCH_FOUND_ROOT}" CACHE INTERNAL "LibTorch of this build")
  set(LIBTORCH_USED_VERSION "${LIBTORCH_VERSION}" CACHE INTERNAL "its version")
endif()

set(_advice "set LIBTORCH_ROOT to the folder that holds include/ and lib/libtorch_cpu.so (pip: .../site-packages/torch, zip: libtorch, conda: the environment), or run ./quickstart.sh, which installs pip's package into .venv")
if(_explicit)
  set(_advice "LIBTORCH_ROOT is ${_explicit}, which holds no LibTorch: ${_advice}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LIBTORCH_FOUND_ROOT LIBTORCH_INCLUDE_DIRS
  VERSION_VAR LIBTORCH_VERSION
  REASON_FAILURE_MESSAGE "${_advice}")

if(LibTorch_FOUND AND NOT TARGET ddp::torch_cpu)
  add_library(ddp::torch_cpu INTERFACE IMPORTED)
  set_target_properties(ddp::torch_cpu PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${LIBTORCH_INCLUDE_DIRS}"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${LIBTORCH_INCLUDE_DIRS}"
    INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=1"
    INTERFACE_LINK_LIBRARIES "${LIBTORCH_LIBRARY_DIR}/libtorch_cpu.so;${LIBTORCH_LIBRARY_DIR}/libc10.so;pthread")
  if(EXISTS "${LIBTORCH_LIBRARY_DIR}/libtorch_cuda.so")
    set(LIBTORCH_HAS_CUDA TRUE)
    # --no-as-needed: libtorch_cuda registers its kernels when loaded; nothing of it need be called.
    add_library(ddp::torch_cuda INTERFACE IMPORTED)
    set_target_properties(ddp::torch_cuda PROPERTIES
      INTERFACE_LINK_LIBRARIES "ddp::torch_cpu;-Wl,--push-state,--no-as-needed;${LIBTORCH_LIBRARY_DIR}/libtorch_cuda.so;${LIBTORCH_LIBRARY_DIR}/libc10_cuda.so;-Wl,--pop-state")
  endif()
endif()
