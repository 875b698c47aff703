// SPDX-License-Identifier: Apache-2.0
#include "export/operator_libraries.hpp"

#include <ATen/Context.h>
#include <dlfcn.h>

#include <filesystem>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

bool load_library(const std::string& path) {
  return ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr;
}

// A file in the folder of the shared object that has `symbol`.
std::string beside(const void* symbol, const char* file) {
  Dl_info info{};
  if (::dladdr(symbol, &info) == 0) {
    return file;
  }
  return std::filesystem::path(info.dli_fname).replace_filename(file).string();
}

// torch.utils.cpp_extension links every library with these two. A program in C++ has neither:
// libtorch.so is an empty name for libtorch_cpu.so, and libddp_no_python.so is one for
// libtorch_python.so, whose own file needs a Python.
void load_names_of_torch() {
  load_library(beside(reinterpret_cast<const void*>(&at::globalContext), "libtorch.so"));
  load_library(
      beside(reinterpret_cast<const void*>(&load_operator_libraries), "libddp_no_python.so"));
}

}  // namespace

void load_operator_libraries(const std::vector<std::string>& libraries) {
  for (const auto& library : libraries) {
    if (load_library(library)) {
      continue;
    }
    load_names_of_torch();
    if (load_library(library)) {
      continue;
    }
    const char* error = ::dlerror();
    const std::string why = error == nullptr ? "unknown" : error;
    const bool needs_python = why.find("undefined symbol: Py") != std::string::npos ||
                              why.find("undefined symbol: _Py") != std::string::npos;
    throw SettingsError(concat(
        "ExportedModuleOptions::libraries: cannot load ", library, ": ", why,
        needs_python ? "; it uses Python; fix: build it without pybind11, or name libpython and "
                       "PyTorch's libtorch_python.so before it"
                     : ""));
  }
}

}  // namespace ddp::detail
