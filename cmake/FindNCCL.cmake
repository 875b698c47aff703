# SPDX-License-Identifier: Apache-2.0
# Finds NCCL, with its version. Defines NCCL::nccl.
include(${CMAKE_CURRENT_LIST_DIR}/DdpFindNvidia.cmake)
ddp_find_nvidia(NCCL nccl nccl.h nccl.h PATCH libnccl.so.2 nccl)
