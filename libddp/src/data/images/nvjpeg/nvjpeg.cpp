// SPDX-License-Identifier: Apache-2.0
#include "data/images/nvjpeg/nvjpeg.hpp"

#include <dlfcn.h>

#include <type_traits>
#include <utility>

#include "comm/cuda_check.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

namespace {

// The used declarations of nvjpeg.h, which need not be installed. NVIDIA keeps the ABI stable
// within a major version.
using Handle = void*;
struct Image {
  unsigned char* channel[4];
  size_t pitch[4];
};
constexpr int kSuccess = 0;
constexpr int kHardware = 3;                // NVJPEG_BACKEND_HARDWARE
constexpr int kInterleavedRgb = 5;          // NVJPEG_OUTPUT_RGBI
constexpr unsigned kInterpolate = 1U << 5;  // NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION

}  // namespace

struct NvJpeg::Library {
  void* file = nullptr;
  Handle handle = nullptr;
  int (*create)(int, void*, void*, unsigned, Handle*) = nullptr;
  int (*destroy)(Handle) = nullptr;
  int (*count_engines)(Handle, unsigned*, unsigned*) = nullptr;
  int (*create_state)(Handle, Handle*) = nullptr;
  int (*destroy_state)(Handle) = nullptr;
  int (*create_parameters)(Handle, Handle*) = nullptr;
  int (*destroy_parameters)(Handle) = nullptr;
  int (*set_format)(Handle, int) = nullptr;
  int (*set_region)(Handle, int, int, int, int) = nullptr;
  int (*prepare)(Handle, Handle, int, int, int) = nullptr;
  int (*decode)(Handle, Handle, const unsigned char* const*, const size_t*, Image*, Handle*,
                cudaStream_t) = nullptr;

  bool load(std::string& reason) {
    const std::string name = concat("libnvjpeg.so.", CUDART_VERSION / 1000);
    for (const std::string& path : {name, "/usr/local/cuda/lib64/" + name}) {
      file = file != nullptr ? file : ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    if (file == nullptr) {
      reason = concat("there is no ", name, " (package libnvjpeg of the CUDA toolkit)");
      return false;
    }
    const auto find = [this](auto& function, const char* symbol) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(file, symbol));
      return function != nullptr;
    };
    if (!(find(create, "nvjpegCreateEx") && find(destroy, "nvjpegDestroy") &&
          find(count_engines, "nvjpegGetHardwareDecoderInfo") &&
          find(create_state, "nvjpegJpegStateCreate") &&
          find(destroy_state, "nvjpegJpegStateDestroy") &&
          find(create_parameters, "nvjpegDecodeParamsCreate") &&
          find(destroy_parameters, "nvjpegDecodeParamsDestroy") &&
          find(set_format, "nvjpegDecodeParamsSetOutputFormat") &&
          find(set_region, "nvjpegDecodeParamsSetROI") &&
          find(prepare, "nvjpegDecodeBatchedInitialize") &&
          find(decode, "nvjpegDecodeBatchedEx"))) {
      reason = concat(name, " is too old: it lacks nvjpegDecodeBatchedEx or a related function");
      return false;
    }
    return true;
  }
  bool start(std::string& reason) {
    unsigned engines = 0;
    unsigned cores = 0;
    if (create(kHardware, nullptr, nullptr, kInterpolate, &handle) != kSuccess ||
        count_engines(handle, &engines, &cores) != kSuccess || engines == 0) {
      reason = "this GPU or its driver has no JPEG engines";
      return false;
    }
    return true;
  }
  ~Library() {
    if (handle != nullptr) {
      (void)destroy(handle);
    }
    if (file != nullptr) {
      ::dlclose(file);
    }
  }
};

NvJpeg::NvJpeg(std::unique_ptr<Library> library) : library_(std::move(library)) {}

std::unique_ptr<NvJpeg> NvJpeg::open(std::string& reason) {
  auto library = std::make_unique<Library>();
  if (!library->load(reason) || !library->start(reason)) {
    return nullptr;
  }
  std::unique_ptr<NvJpeg> decoder(new NvJpeg(std::move(library)));
  if (decoder->library_->create_state(decoder->library_->handle, &decoder->state_) != kSuccess) {
    reason = "nvJPEG cannot create a decoding state";
    return nullptr;
  }
  return decoder;
}

NvJpeg::~NvJpeg() {
  for (void* parameters : parameters_) {
    (void)library_->destroy_parameters(parameters);
  }
  if (state_ != nullptr) {
    (void)library_->destroy_state(state_);
  }
}

int NvJpeg::prepare(size_t num_images) {
  while (parameters_.size() < num_images) {
    void* made = nullptr;
    if (const int status = library_->create_parameters(library_->handle, &made);
        status != kSuccess) {
      return status;
    }
    parameters_.push_back(made);
    if (const int status = library_->set_format(made, kInterleavedRgb); status != kSuccess) {
      return status;
    }
  }
  constexpr int kHostThreads = 1;
  if (prepared_ != num_images) {
    const int status = library_->prepare(library_->handle, state_, static_cast<int>(num_images),
                                         kHostThreads, kInterleavedRgb);
    if (status != kSuccess) {
      return status;
    }
  }
  prepared_ = num_images;
  return kSuccess;
}

NvJpegAnswer NvJpeg::decode(std::span<const NvJpegImage> images, cudaStream_t stream) {
  std::vector<const unsigned char*> data;
  std::vector<size_t> lengths;
  std::vector<Image> outputs;
  int status = prepare(images.size());
  const bool saw_images = status == kSuccess;
  for (size_t i = 0; status == kSuccess && i < images.size(); ++i) {
    const auto& [bytes, region, out] = images[i];
    data.push_back(bytes->data());
    lengths.push_back(bytes->size());
    outputs.push_back({{out}, {static_cast<size_t>(region.width) * 3}});
    status = library_->set_region(parameters_[i], region.x, region.y, region.width, region.height);
  }
  if (status == kSuccess) {
    status = library_->decode(library_->handle, state_, data.data(), lengths.data(), outputs.data(),
                              parameters_.data(), stream);
  }
  // Also after a failure: part of the batch may still be written to memory that is reused next.
  const cudaError_t cuda = cudaStreamSynchronize(stream);
  prepared_ = status == kSuccess && cuda == cudaSuccess ? prepared_ : 0;
  check_cuda(cuda, "decoding images with nvJPEG");
  const NvJpegAnswer answer = nvjpeg_answer(status, saw_images);
  if (answer == NvJpegAnswer::Failed) {
    throw Error(ExitCode::UserException,
                concat("nvJPEG failed with status ", status,
                       " (nvjpegStatus_t), which no image causes; fix: set "
                       "loader.jpeg_decoder=cpu"));
  }
  return answer;
}

}  // namespace ddp::detail
