#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Breaks the code on purpose, one mutation at a time, and expects a test to fail. run.py has usage and exit codes.
set -euo pipefail
here=$(CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup.sh
source "$here/../../scripts/setup.sh"

case " $* " in
  *" --check "* | *" --help "* | *" -h "*)
    [ -d "$DDP_VENV/bin" ] && PATH=$DDP_VENV/bin:$PATH
    ;;
  *)
    install_packages
    install_python_parts
    mpi_settings
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    ;;
esac
exec python3 "$here/run.py" "$@"
