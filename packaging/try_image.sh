#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains a few steps with two ranks in an image of packaging/build_image.sh, and looks for the licences in it.
#
# usage: packaging/try_image.sh [IMAGE] [TOOL]
#   IMAGE   name of the image (default: libddp:cpu)
#   TOOL    docker or podman (default: docker if it is installed)
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh"
answer_help "$@"
image=${1:-libddp:cpu}
tool=${2:-}
[ -n "$tool" ] || { has docker && tool=docker || tool=podman; }
has "$tool" || die "$tool is not installed; fix: install docker or podman, or name one behind the image"

# inside COMMAND…: in a container that sees the sample.
inside() { "$tool" run --rm --shm-size=1g -v "$DDP_ROOT/data:/data:ro" "$image" "$@"; }

inside resnet_ddp --version
inside mpirun -n 2 resnet_ddp --config /opt/ddp/libddp/share/ddp/configs/quickstart.yaml data.path=/data/cifar10-sample \
  data.num_samples=160 train.epochs=0 train.max_steps=4 train.batch_size=16 metrics.log_every=2 context.device=cpu
licences=$(inside find /opt/ddp -type f -path '*licences*' | wc -l)
[ "$licences" -ge 8 ] || die "the image has only $licences files with licences"
say "$image trains with two ranks, and has $licences files with licences"
