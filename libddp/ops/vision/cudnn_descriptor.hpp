// SPDX-License-Identifier: Apache-2.0
// cuDNN's backend descriptors (cudnn_backend.h), with numbered attributes.
#pragma once

#include <c10/util/Exception.h>
#include <cudnn_backend.h>

#include <initializer_list>
#include <vector>

namespace ddp::ops::detail {

inline void check_cudnn(cudnnStatus_t status, const char* what) {
  TORCH_CHECK(status == CUDNN_STATUS_SUCCESS, "conv2d: ", what, " failed with ",
              cudnnGetErrorString(status));
}

class CudnnDescriptor {
 public:
  explicit CudnnDescriptor(cudnnBackendDescriptorType_t type) {
    check_cudnn(cudnnBackendCreateDescriptor(type, &value_), "cudnnBackendCreateDescriptor");
  }
  ~CudnnDescriptor() {
    if (value_ != nullptr) {
      cudnnBackendDestroyDescriptor(value_);
    }
  }
  CudnnDescriptor(CudnnDescriptor&& other) noexcept : value_(other.value_) {
    other.value_ = nullptr;
  }
  CudnnDescriptor(const CudnnDescriptor&) = delete;
  CudnnDescriptor& operator=(const CudnnDescriptor&) = delete;
  CudnnDescriptor& operator=(CudnnDescriptor&&) = delete;

  cudnnBackendDescriptor_t get() const { return value_; }

  template <typename T>
  CudnnDescriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                       const std::vector<T>& values) {
    check_cudnn(cudnnBackendSetAttribute(value_, name, type, static_cast<int64_t>(values.size()),
                                         values.data()),
                "cudnnBackendSetAttribute");
    return *this;
  }
  template <typename T>
  CudnnDescriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                       const T& value) {
    return set(name, type, std::vector<T>{value});
  }
  CudnnDescriptor& set(cudnnBackendAttributeName_t name, const CudnnDescriptor& other) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, other.value_);
  }

  /// Whether cuDNN accepts the descriptor.
  bool try_finalize() { return cudnnBackendFinalize(value_) == CUDNN_STATUS_SUCCESS; }
  CudnnDescriptor& finalize() {
    check_cudnn(cudnnBackendFinalize(value_), "cudnnBackendFinalize");
    return *this;
  }

  int64_t number(cudnnBackendAttributeName_t name) const {
    int64_t value = 0, count = 0;
    check_cudnn(cudnnBackendGetAttribute(value_, name, CUDNN_TYPE_INT64, 1, &count, &value),
                "cudnnBackendGetAttribute");
    return value;
  }

 private:
  cudnnBackendDescriptor_t value_ = nullptr;
};

}  // namespace ddp::ops::detail
