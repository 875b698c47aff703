// SPDX-License-Identifier: Apache-2.0
// What nvJPEG's status says of a batch, free of CUDA.
#pragma once

namespace ddp::detail {

enum class NvJpegAnswer {
  Decoded,
  Refused,   ///< it does not decode one of the images
  NoMemory,  ///< of the GPU
  Failed     ///< no image's fault
};

/// `status` is an nvjpegStatus_t; `saw_images`: of a call that was given the images, so that what
/// does not decode may be one of them. The engines say of some damaged files only that they failed
/// (6, 8): whether CUDA did is for the caller to ask.
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
