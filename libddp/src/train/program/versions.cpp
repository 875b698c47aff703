// SPDX-License-Identifier: Apache-2.0
#include <ATen/Version.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/version.h>

#include <sstream>
#include <string>

#include "ddp_commit.hpp"
#include "train/program/help_version.hpp"
#if DDP_HAS_CUDA
#include <cuda_runtime_api.h>
#include <nccl.h>
#endif
#if DDP_HAS_CUDNN
#include <cudnn_version.h>
#endif
#if DDP_HAS_MPI
#include <mpi.h>
#endif

#include "ddp/core/error.hpp"

namespace ddp {
namespace {

[[maybe_unused]] constexpr const char* kNone = "none (built without it)";

// One line: the version as built, and as loaded if that is another one.
std::string version_line(const std::string& name, const std::string& built,
                         const std::string& loaded) {
  constexpr std::size_t kColumn = 10;
  const bool differs = !loaded.empty() && loaded.find(built) == std::string::npos;
  return concat(name, std::string(kColumn - name.size(), ' '), built,
                differs ? concat(" (loaded: ", loaded, ")") : "", "\n");
}

// LibTorch tells the version of its files only in the text of its build settings.
std::string loaded_libtorch() {
  const std::string key = "TORCH_VERSION=";
  const std::string text = at::show_config();
  const std::size_t begin = text.find(key);
  return begin == std::string::npos
             ? ""
             : text.substr(begin + key.size(),
                           text.find_first_of(", \n", begin) - begin - key.size());
}

#if DDP_HAS_CUDA
// 22807 is 2.28.7.
std::string dotted(int64_t version) {
  return concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

// 13020 is 13.2.
std::string cuda_version(int version) {
  return concat(version / 1000, ".", version % 1000 / 10);
}

std::string cuda_lines() {
  int runtime = 0, nccl = 0;
  const bool has_runtime = cudaRuntimeGetVersion(&runtime) == cudaSuccess;
  const bool has_nccl = ncclGetVersion(&nccl) == ncclSuccess;
  std::string lines =
      version_line("CUDA", cuda_version(CUDART_VERSION), has_runtime ? cuda_version(runtime) : "") +
      version_line("NCCL", dotted(NCCL_VERSION_CODE), has_nccl ? dotted(nccl) : "");
#if DDP_HAS_CUDNN
  const auto& hooks = at::detail::getCUDAHooks();
  return lines + version_line("cuDNN", dotted(CUDNN_VERSION),
                              hooks.compiledWithCuDNN() ? dotted(hooks.versionRuntimeCuDNN()) : "");
#else
  return lines + version_line("cuDNN", kNone, "");
#endif
}
#else
std::string cuda_lines() {
  return version_line("CUDA", kNone, "") + version_line("NCCL", kNone, "") +
         version_line("cuDNN", kNone, "");
}
#endif

#if DDP_HAS_MPI
std::string mpi_line() {
#if defined(OMPI_MAJOR_VERSION)
  const std::string name = "Open MPI ";
  const std::string built =
      concat(OMPI_MAJOR_VERSION, ".", OMPI_MINOR_VERSION, ".", OMPI_RELEASE_VERSION);
#elif defined(MPICH_VERSION)
  const std::string name = "MPICH ", built = MPICH_VERSION;
#else
  const std::string name = "MPI standard ", built = concat(MPI_VERSION, ".", MPI_SUBVERSION);
#endif
  // MPI_Get_library_version may be called before MPI_Init. Only its first words have the version.
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string all(text);
  const std::string loaded = all.substr(0, all.find_first_of(",\n"));
  return version_line("MPI", name + built, loaded.find(built) == std::string::npos ? loaded : "");
}
#else
std::string mpi_line() {
  return version_line("MPI", kNone, "");
}
#endif

}  // namespace

std::string detail::version_text() {
  const std::string commit = DDP_COMMIT;
  return version_line("libddp",
                      DDP_VERSION_STRING + (commit.empty() ? "" : concat(" (commit ", commit, ")")),
                      "") +
         version_line("LibTorch", TORCH_VERSION, loaded_libtorch()) + cuda_lines() + mpi_line();
}

}  // namespace ddp
