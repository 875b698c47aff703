// SPDX-License-Identifier: Apache-2.0
// Builds the tables of flat/math.hpp from tensors.
#pragma once

#include <ATen/Functions.h>

#include <cstring>
#include <vector>

#include "optim/flat/math.hpp"
#include "optim/parameter_settings.hpp"

namespace ddp::detail {

/// Copies a table of plain structs to `device` as bytes, for kernels. The host waits.
template <typename T>
at::Tensor to_device(const std::vector<T>& table, at::Device device) {
  const auto bytes = static_cast<int64_t>(table.size() * sizeof(T));
  at::Tensor host = at::empty({bytes}, at::kByte);
  if (bytes > 0) {  // memcpy takes no null pointer
    std::memcpy(host.data_ptr(), table.data(), static_cast<size_t>(bytes));
  }
  return host.to(device);
}

inline bool is_flat_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || is_half(dtype);
}

inline FlatDtype flat_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return FlatDtype::BFloat16;
    case at::kHalf:
      return FlatDtype::Float16;
    default:
      return FlatDtype::Float32;
  }
}

/// Whether four elements can be loaded at once from `pointer`.
inline bool is_aligned(const void* pointer, at::ScalarType dtype) {
  return reinterpret_cast<uintptr_t>(pointer) % (4 * c10::elementSize(dtype)) == 0;
}

/// Splits segment `index` into chunks.
inline void append_chunks(std::vector<FlatChunk>& chunks, size_t index, int64_t numel) {
  for (int64_t k = 0; k * kFlatChunk < numel; ++k) {
    chunks.push_back({static_cast<int32_t>(index), static_cast<int32_t>(k)});
  }
}

}  // namespace ddp::detail
