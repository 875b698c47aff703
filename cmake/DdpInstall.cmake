# SPDX-License-Identifier: Apache-2.0
# `cmake --install`: libraries, headers, a relocatable CMake package, ddp.pc, programs, tools and samples. share/ddp has
# the repository's folders examples/, slurm/, tools/ and data/, so that its commands work there too.
include(CMakePackageConfigHelpers)

set(DDP_INSTALL_CMAKEDIR ${CMAKE_INSTALL_LIBDIR}/cmake/ddp)
if(NOT DDP_TORCH_BESIDE)  # a wheel has no links: each name would be a copy of the library
  set_target_properties(ddp_ops ddp ddp_models ddp_pretrained ddp_tokens PROPERTIES
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endif()

# LibTorch is not ours to move: the libraries remember where it was, LD_LIBRARY_PATH says where it is.
set(_torch_rpath ${LIBTORCH_LIBRARY_DIR})
if(DDP_HAS_CUDA)
  set(_libs ${NCCL_LIBRARY} ${CUDA_cudart_LIBRARY})
  if(CUDNN_FOUND)
    list(APPEND _libs ${CUDNN_LIBRARY})
  endif()
  foreach(_lib ${_libs})
    get_filename_component(_dir ${_lib} DIRECTORY)
    list(APPEND _torch_rpath ${_dir})
  endforeach()
  list(REMOVE_DUPLICATES _torch_rpath)
endif()
if(DDP_TORCH_BESIDE)
  # lib and bin are two folders below site-packages. PyPI's Open MPI puts its library two folders above it.
  set(_torch_rpath "$ORIGIN/../../torch/lib")
  file(GLOB _nvidia RELATIVE ${LIBTORCH_NVIDIA_DIR} ${LIBTORCH_NVIDIA_DIR}/*/lib)
  list(TRANSFORM _nvidia PREPEND "$ORIGIN/../../nvidia/")
  list(APPEND _torch_rpath ${_nvidia} "$ORIGIN/../../../..")
endif()
set_target_properties(ddp_ops ddp ddp_models ddp_pretrained ddp_tokens PROPERTIES INSTALL_RPATH "$ORIGIN;${_torch_rpath}")

install(TARGETS ddp_ops ddp ddp_user_pch ddp_models ddp_pretrained ddp_tokens EXPORT ddpTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS ddp_no_python LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT ddpTargets NAMESPACE ddp:: DESTINATION ${DDP_INSTALL_CMAKEDIR})
install(DIRECTORY libddp/include/ libddp/ops/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")
install(DIRECTORY models/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")

# ddp_install_program(target): to bin/, where it finds the libraries beside it. share/ddp/examples/ has a link, so that
# `./examples/resnet_ddp` starts it there as in a build folder.
set(_share ${CMAKE_INSTALL_DATADIR}/ddp)
file(RELATIVE_PATH _lib /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
function(ddp_install_program target)
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN/${_lib};${_torch_rpath}")
  install(TARGETS ${target} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  _ddp_install_link(${CMAKE_INSTALL_BINDIR}/$<TARGET_FILE_NAME:${target}> examples/$<TARGET_FILE_NAME:${target}>)
endfunction()
# _ddp_install_link(path name): a relative link share/ddp/<name> to PREFIX/<path>.
function(_ddp_install_link path name)
  if(NOT DDP_TORCH_BESIDE)  # a wheel has no links
    cmake_path(GET name PARENT_PATH _below)
    file(RELATIVE_PATH _up /${_share}/${_below} /)
    install(CODE "set(_link \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${_share}/${name}\")
      cmake_path(GET _link PARENT_PATH _folder)
      file(MAKE_DIRECTORY \"\${_folder}\")
      file(CREATE_LINK \"${_up}${path}\" \"\${_link}\" SYMBOLIC)")
  endif()
endfunction()
if(DDP_BUILD_EXAMPLES)
  # Recipes are programs to copy from, so they stay behind.
  get_property(_programs DIRECTORY ${PROJECT_SOURCE_DIR}/examples PROPERTY BUILDSYSTEM_TARGETS)
  foreach(_program ${_programs})
    get_target_property(_type ${_program} TYPE)
    if(_type STREQUAL "EXECUTABLE")
      ddp_install_program(${_program})
    endif()
  endforeach()
  install(DIRECTORY examples/configs DESTINATION ${_share} OPTIONAL)
  _ddp_install_link(${_share}/configs examples/configs)
  # Where find_data_path() looks.
  install(DIRECTORY data/chat-sample data/exported-sample data/masked-text-sample data/text-sample data/waveform-sample
          DESTINATION ${_share}/data)
  if(NOT DDP_TORCH_BESIDE)  # wheels and images are passed on, and these images' terms are others than this library's
    install(DIRECTORY data/cifar10-sample DESTINATION ${_share}/data)
  endif()
  install(FILES data/README.md DESTINATION ${_share}/data)  # whose the samples are
endif()

# Python tools, and a launcher for each: bin/libddp-top starts share/ddp/tools/ddp_top.py. A wheel has its own commands,
# and images have no Python.
if(NOT DDP_TORCH_BESIDE)
  install(DIRECTORY tools/ DESTINATION ${_share}/tools USE_SOURCE_PERMISSIONS
          FILES_MATCHING PATTERN "*.py" PATTERN "__pycache__" EXCLUDE
          PATTERN "cluster_check" EXCLUDE PATTERN "selftest" EXCLUDE)
  install(DIRECTORY packaging/python/libddp DESTINATION ${_share}/packaging/python
          FILES_MATCHING PATTERN "*.py" PATTERN "__pycache__" EXCLUDE)  # export_model.py imports it
  install(DIRECTORY data/ DESTINATION ${_share}/data USE_SOURCE_PERMISSIONS
          FILES_MATCHING PATTERN "*.py" PATTERN "__pycache__" EXCLUDE PATTERN "*-sample" EXCLUDE)
  file(RELATIVE_PATH DDP_TOOLS_FROM_BIN /${CMAKE_INSTALL_BINDIR} /${_share}/tools)
  foreach(_tool top=ddp_top plot-run=plot_run plot-scaling=plot_scaling plot-check=plot_check study=study
                export-metrics=export_metrics export=export_model system-report=system_report
                random-tokens=random_tokens chat=chat)
    string(REPLACE "=" ";" _tool ${_tool})
    list(GET _tool 0 _name)
    list(GET _tool 1 DDP_TOOL)
    configure_file(cmake/tool.sh.in ${CMAKE_BINARY_DIR}/package/bin/libddp-${_name} @ONLY)
    install(PROGRAMS ${CMAKE_BINARY_DIR}/package/bin/libddp-${_name} DESTINATION ${CMAKE_INSTALL_BINDIR})
  endforeach()
  # The site's own env.sh stays behind.
  install(DIRECTORY slurm DESTINATION ${_share} USE_SOURCE_PERMISSIONS
          FILES_MATCHING PATTERN "*.sbatch" PATTERN "*.yaml" PATTERN "job.sh" PATTERN "env.example.sh")
endif()

# The licence of a file of another project: Debian and Ubuntu keep it in /usr/share/doc/<package>/copyright. Packages
# list the name under /usr also where /lib is a link to it.
function(_ddp_install_licence file)
  execute_process(COMMAND dpkg-query -S "*/${file}" OUTPUT_VARIABLE _owner ERROR_QUIET)
  string(REGEX MATCH "^[^:, ]+" _package "${_owner}")
  if(_package AND EXISTS "/usr/share/doc/${_package}/copyright")
    install(FILES "/usr/share/doc/${_package}/copyright" DESTINATION ${CMAKE_INSTALL_DOCDIR}/licences
            RENAME "${_package}.txt")
  else()
    message(STATUS "ddp: ${file} is installed along, but its licence text was not found: add it before "
                   "you pass the install tree on")
  endif()
endfunction()
# These are compiled into the libraries.
set(_compiled_in include/spdlog/spdlog.h include/fmt/core.h include/nlohmann/json.hpp include/xxhash.h)
if(DDP_HAS_LIBJPEG)
  get_filename_component(_name "${JPEGLIB_LIBRARY}" NAME)
  list(APPEND _compiled_in ${_name})
endif()
foreach(_file ${_compiled_in})
  _ddp_install_licence(${_file})
endforeach()

# yaml-cpp changes its name with every release of a distribution, and libjpeg-turbo's turbojpeg, libpng and libwebp
# are often absent: the files that were linked travel along under the name the loader asks for.
function(_ddp_install_bundled library)
  get_filename_component(_real "${library}" REALPATH)
  execute_process(COMMAND ${CMAKE_OBJDUMP} -p "${_real}" OUTPUT_VARIABLE _dump ERROR_QUIET)
  if(_real MATCHES "\\.so" AND _dump MATCHES "SONAME +([^\n ]+)")
    install(FILES "${_real}" DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME "${CMAKE_MATCH_1}")
    get_filename_component(_name "${_real}" NAME)
    _ddp_install_licence(${_name})
  endif()
endfunction()
if(DDP_INSTALL_BUNDLED)
  find_library(DDP_YAML_CPP_LIBRARY NAMES yaml-cpp HINTS ${YAML_CPP_LIBRARY_DIRS} ${YAML_CPP_LIBRARY_DIR})
  mark_as_advanced(DDP_YAML_CPP_LIBRARY)
  _ddp_install_bundled("${DDP_YAML_CPP_LIBRARY}")
  _ddp_install_bundled("${TURBOJPEG_LIBRARY}")
  _ddp_install_bundled("${PNG_LIBRARY_RELEASE}")
  if(DDP_HAS_WEBP)
    _ddp_install_bundled("${WEBP_LIBRARY}")
  endif()
endif()

# find_package(ddp): finds LibTorch again on the machine it runs on, with the same module.
string(REGEX MATCH "^[0-9]+\\.[0-9]+" DDP_LIBTORCH_SERIES "${LIBTORCH_VERSION}")
configure_package_config_file(cmake/ddpConfig.cmake.in ${CMAKE_BINARY_DIR}/package/ddpConfig.cmake
  INSTALL_DESTINATION ${DDP_INSTALL_CMAKEDIR} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/package/ddpConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/package/ddpConfig.cmake ${CMAKE_BINARY_DIR}/package/ddpConfigVersion.cmake
  cmake/FindLibTorch.cmake cmake/DdpSharedPch.cmake cmake/pch.cpp DESTINATION ${DDP_INSTALL_CMAKEDIR})

# pkg-config: ${pcfiledir} keeps it relocatable; --define-variable=libtorch=… names another LibTorch.
file(RELATIVE_PATH DDP_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" DDP_PC_PREFIX "${DDP_PC_PREFIX}")
set(DDP_PC_CFLAGS "")
set(DDP_PC_LIBS "-ltorch_cpu -lc10")
if(DDP_HAS_CUDA)
  list(TRANSFORM CUDAToolkit_INCLUDE_DIRS PREPEND " -isystem " OUTPUT_VARIABLE _cuda_includes)
  string(JOIN "" DDP_PC_CFLAGS " -DDDP_HAS_CUDA=1" ${_cuda_includes})
  set(DDP_PC_LIBS "-Wl,--push-state,--no-as-needed -ltorch_cuda -lc10_cuda -Wl,--pop-state ${DDP_PC_LIBS}")
endif()
configure_file(cmake/ddp.pc.in ${CMAKE_BINARY_DIR}/package/ddp.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/package/ddp.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(NOT DDP_TORCH_BESIDE)  # module use PREFIX/share/ddp/modulefiles; module load libddp
  configure_file(packaging/lmod/libddp.lua.in ${CMAKE_BINARY_DIR}/package/${PROJECT_VERSION}.lua @ONLY)
  install(FILES ${CMAKE_BINARY_DIR}/package/${PROJECT_VERSION}.lua
          DESTINATION ${CMAKE_INSTALL_DATADIR}/ddp/modulefiles/libddp)
endif()
install(FILES LICENSE README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md CITATION.cff DESTINATION ${CMAKE_INSTALL_DOCDIR})
# The pages, and the programs that they explain.
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY examples DESTINATION ${CMAKE_INSTALL_DOCDIR}
        FILES_MATCHING PATTERN "*.cpp" PATTERN "*.hpp" PATTERN "*.py" PATTERN "*.yaml")
install(FILES data/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR}/data)
