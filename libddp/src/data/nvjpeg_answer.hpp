// SPDX-License-Identifier: Apache-2.0
// The meaning of nvJPEG's status for a batch; independent of CUDA.
#pragma once

namespace ddp::detail {

enum class NvJpegAnswer {
  Decoded,
  Refused,   ///< nvJPEG cannot decode one of the images
  NoMemory,  ///< out of GPU memory
  Failed     ///< failure unrelated to the images
};

/// `status` is an nvjpegStatus_t. `saw_images`: the call received the images, so one of them may be
/// the cause. For some damaged files the engines only report a failure (6, 8); the caller must
/// check whether CUDA failed.
constexpr NvJpegAnswer nvjpeg_answer(int status, bool saw_images) {
  switch (status) {
    case 0:  // SUCCESS
      return NvJpegAnswer::Decoded;
    case 5:  // ALLOCATOR_FAILURE
      return NvJpegAnswer::NoMemory;
    case 2:   // INVALID_PARAMETER
    case 3:   // BAD_JPEG
    case 4:   // JPEG_NOT_SUPPORTED
    case 6:   // EXECUTION_FAILED
    case 8:   // INTERNAL_ERROR
    case 9:   // IMPLEMENTATION_NOT_SUPPORTED
    case 10:  // INCOMPLETE_BITSTREAM
      return saw_images ? NvJpegAnswer::Refused : NvJpegAnswer::Failed;
    default:  // NOT_INITIALIZED, ARCH_MISMATCH
      return NvJpegAnswer::Failed;
  }
}

}  // namespace ddp::detail
