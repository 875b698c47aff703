# This recipe was not run: Spack was not at hand. Only Python's compiler has read it.
#
# SPDX-License-Identifier: Apache-2.0
# In a folder packages/libddp of your own Spack repository. It builds a clone of libddp:
#   spack develop --path CLONE libddp@=0.1.0
#   spack install libddp +mpi ~cuda

from spack_repo.builtin.build_systems.cmake import CMakePackage
from spack_repo.builtin.build_systems.cuda import CudaPackage

from spack.package import *


class Libddp(CMakePackage, CudaPackage):
    """Data-parallel training for C++ programs on LibTorch."""

    license("Apache-2.0")

    version("0.1.0")

    variant("mpi", default=True, description="Several CPU ranks, and start by mpirun")
    variant("webp", default=True, description="WebP images")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.28:", type="build")
    depends_on("ninja", type="build")

    depends_on("py-torch@2.11: ~cuda", when="~cuda")
    depends_on("py-torch@2.11: +cuda +cudnn +nccl", when="+cuda")
    depends_on("cuda@13:", when="+cuda")
    depends_on("nccl@2.18:", when="+cuda")
    depends_on("cudnn@9:", when="+cuda")
    depends_on("openmpi@4.1", when="+mpi")
    depends_on("spdlog +fmt_external")
    depends_on("fmt")
    depends_on("yaml-cpp")
    depends_on("nlohmann-json")
    depends_on("openssl")
    depends_on("xxhash")
    depends_on("libjpeg-turbo")
    depends_on("zlib-api")
    depends_on("libpng")
    depends_on("libwebp", when="+webp")

    generator("ninja")

    conflicts("%gcc@:11", msg="libddp needs C++20 of GCC 12 or newer")
    conflicts("cuda_arch=none", when="+cuda", msg="name the GPUs, for example cuda_arch=90")

    def cmake_args(self):
        torch = join_path(self.spec["py-torch"].prefix, self.spec["python"].package.platlib, "torch")
        arguments = [
            self.define("LIBTORCH_ROOT", torch),
            self.define("DDP_BUILD_TESTS", False),
            self.define("DDP_INSTALL_BUNDLED", False),
            self.define("DDP_WITH_CUDA", "ON" if "+cuda" in self.spec else "OFF"),
            self.define("DDP_WITH_MPI", "ON" if "+mpi" in self.spec else "OFF"),
        ]
        if "+cuda" in self.spec:
            arguments.append(self.define("CMAKE_CUDA_ARCHITECTURES", self.spec.variants["cuda_arch"].value))
        return arguments
