// SPDX-License-Identifier: Apache-2.0
// The JPEG engines of a GPU through NVIDIA's nvJPEG, which is looked for at run time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/nvjpeg_answer.hpp"
#include "ddp/data/augmentation.hpp"

namespace ddp::detail {

/// One image and where a part of it goes.
struct NvJpegImage {
  const std::vector<uint8_t>* bytes = nullptr;  ///< is_plain_baseline
  CropBox region;                               ///< in pixels of the image
  uint8_t* out = nullptr;                       ///< device memory, [height, width, 3]
};

/// One batch at a time: the caller locks.
class NvJpeg {
 public:
  /// On the current device. nullptr, and why in `reason`, where there is no library or no engine.
  static std::unique_ptr<NvJpeg> open(std::string& reason);
  ~NvJpeg();

  /// Decodes all images; the host waits until it is done. Where a part of an image is as in the
  /// CPU's decoding: exactly at 4:4:4 and in grey images; colours of others are enlarged otherwise.
  /// Refused, NoMemory: nothing is decoded. Throws ddp::Error where CUDA or nvJPEG fails.
  NvJpegAnswer decode(std::span<const NvJpegImage> images, cudaStream_t stream);

 private:
  struct Library;
  explicit NvJpeg(std::unique_ptr<Library> library);
  int prepare(size_t num_images);  ///< nvjpegStatus_t

  std::unique_ptr<Library> library_;
  void* state_ = nullptr;
  std::vector<void*> parameters_;  ///< of decoding one image
  size_t prepared_ = 0;            ///< images of a batch; 0: to be prepared anew
};

}  // namespace ddp::detail
