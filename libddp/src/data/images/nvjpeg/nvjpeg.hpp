// SPDX-License-Identifier: Apache-2.0
// The JPEG engines of a GPU through NVIDIA's nvJPEG, loaded at run time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/images/augmentation.hpp"
#include "data/images/nvjpeg/jpeg_scan.hpp"

namespace ddp::detail {

/// One image, and the destination of its region.
struct NvJpegImage {
  const std::vector<uint8_t>* bytes = nullptr;  ///< is_plain_baseline
  CropBox region;                               ///< in pixels of the image
  uint8_t* out = nullptr;                       ///< device memory, [height, width, 3]
};

/// Decodes one batch at a time. The caller must hold a lock.
class NvJpeg {
 public:
  /// Opens the library on the current device. Returns nullptr and sets `reason` if there is no
  /// library or no engine.
  static std::unique_ptr<NvJpeg> open(std::string& reason);
  ~NvJpeg();

  /// Decodes all images; the host waits. Pixels of 4:4:4 and grey images equal the CPU's; other
  /// images differ in colour upsampling. Refused, NoMemory: no image is decoded. Throws ddp::Error
  /// if CUDA or nvJPEG fails.
  NvJpegAnswer decode(std::span<const NvJpegImage> images, cudaStream_t stream);

 private:
  struct Library;
  explicit NvJpeg(std::unique_ptr<Library> library);
  int prepare(size_t num_images);  ///< nvjpegStatus_t

  std::unique_ptr<Library> library_;
  void* state_ = nullptr;
  std::vector<void*> parameters_;  ///< for decoding one image
  size_t prepared_ = 0;            ///< images per batch; 0: must be prepared again
};

}  // namespace ddp::detail
