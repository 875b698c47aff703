// SPDX-License-Identifier: Apache-2.0
// Tables of plain structs in device memory, for kernels.
#pragma once

#include <ATen/Functions.h>

#include <cstring>
#include <vector>

namespace ddp::detail {

/// The table as bytes on `device`. The host waits.
template <typename T>
at::Tensor to_device(const std::vector<T>& table, at::Device device) {
  const auto bytes = static_cast<int64_t>(table.size() * sizeof(T));
  at::Tensor host = at::empty({bytes}, at::kByte);
  std::memcpy(host.data_ptr(), table.data(), static_cast<size_t>(bytes));
  return host.to(device);
}

}  // namespace ddp::detail
