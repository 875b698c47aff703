// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "ddp/data/dataset.hpp"
#include "ddp/detail/prefetch_source.hpp"

namespace ddp::detail {

/// Returns a builder for JPEG images on a GPU if options.device_transform allows one, else nullptr.
/// Throws SettingsError if device_transform=on is impossible.
std::unique_ptr<BatchBuilder<Batch>> make_device_builder(
    const std::shared_ptr<const Dataset>& dataset, at::Device device, const LoaderOptions& options,
    int num_slots, int64_t max_batch);

}  // namespace ddp::detail
