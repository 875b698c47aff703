// SPDX-License-Identifier: Apache-2.0
#include "comm/copy_kernels.hpp"

#include <nccl.h>

#include <algorithm>

#include "ops/kernel_types.cuh"

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 9)
#include <nccl_device.h>
#endif

namespace ddp::detail {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024;

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 9)
__global__ void peer_addresses(ncclWindow_t window, int world_size, void** addresses) {
  for (int rank = 0; rank < world_size; ++rank) {
    addresses[rank] = ncclGetPeerPointer(window, 0, rank);
  }
}
#endif

template <typename T>
struct alignas(16) Vector {
  static constexpr int kCount = 16 / sizeof(T);
  T values[kCount];
};

template <typename T>
__global__ void __launch_bounds__(kThreads) part_sum(PartSum sum) {
  const auto count = static_cast<int64_t>(sum.num_bytes / sizeof(T));
  const int64_t num_vectors = (count + Vector<T>::kCount - 1) / Vector<T>::kCount;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  auto* own = static_cast<Vector<T>*>(sum.own);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < num_vectors;
       i += stride) {
    float total[Vector<T>::kCount] = {};
    for (int rank = 0; rank < sum.world_size; ++rank) {
      const auto* slot = reinterpret_cast<const Vector<T>*>(static_cast<const char*>(sum.slots) +
                                                            rank * sum.slot_bytes);
      const Vector<T> part = rank == sum.rank ? own[i] : slot[i];
      for (int k = 0; k < Vector<T>::kCount; ++k) {
        total[k] += ops::detail::to_float(part.values[k]);
      }
    }
    Vector<T> result;
    for (int k = 0; k < Vector<T>::kCount; ++k) {
      result.values[k] = ops::detail::from_float<T>(total[k] * sum.factor);
    }
    if ((i + 1) * Vector<T>::kCount <= count) {
      own[i] = result;
    } else {
      for (int64_t k = 0; k < count - i * Vector<T>::kCount; ++k) {
        own[i].values[k] = result.values[k];
      }
    }
  }
}

template <typename T>
cudaError_t launch(const PartSum& sum, cudaStream_t stream) {
  const auto num_vectors = static_cast<int64_t>((sum.num_bytes + 15) / 16);
  const auto blocks = std::clamp<int64_t>((num_vectors + kThreads - 1) / kThreads, 1, kMaxBlocks);
  part_sum<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(sum);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_peer_addresses(void* window, int world_size, void** addresses,
                                  cudaStream_t stream) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 9)
  peer_addresses<<<1, 1, 0, stream>>>(static_cast<ncclWindow_t>(window), world_size, addresses);
  return cudaGetLastError();
#else
  static_cast<void>(window);
  static_cast<void>(world_size);
  static_cast<void>(addresses);
  static_cast<void>(stream);
  return cudaErrorNotSupported;
#endif
}

cudaError_t launch_part_sum(const PartSum& sum, ops::detail::Element element, cudaStream_t stream) {
  return ops::detail::with_float_type(
      element, [&](auto tag) { return launch<typename decltype(tag)::type>(sum, stream); });
}

}  // namespace ddp::detail
