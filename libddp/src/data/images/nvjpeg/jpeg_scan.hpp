// SPDX-License-Identifier: Apache-2.0
// What nvJPEG can decode, and the meaning of its answers; independent of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace ddp::detail {

/// Whether `bytes` is one complete plain image (ITU-T T.81): baseline, 8 bits, grey or YCbCr at
/// 4:4:4, 4:2:2, 4:4:0 or 4:2:0, in one scan. The scan must end with the end marker and contain
/// only byte pairs valid in a scan. Other damage is not detected.
bool is_plain_baseline(std::span<const uint8_t> bytes);

/// Decodes images 0 … num_images - 1 with a batch decoder that only reports whether it refused the
/// batch. Bisects refused batches and returns the refused images in order. `decode(first, last)`
/// decodes images [first, last); false: none of them is decoded.
std::vector<size_t> refused_images(size_t num_images,
                                   const std::function<bool(size_t first, size_t last)>& decode);

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
