# SPDX-License-Identifier: Apache-2.0
# Finds cuDNN, with its version. Defines CUDNN::cudnn.
include(${CMAKE_CURRENT_LIST_DIR}/DdpFindNvidia.cmake)
ddp_find_nvidia(CUDNN cudnn cudnn_backend.h cudnn_version.h PATCHLEVEL libcudnn.so.9 cudnn)
