// SPDX-License-Identifier: Apache-2.0
// Data sets whose decoded images stay in GPU memory.
#pragma once

#include <memory>
#include <string>

#include "ddp/data/data_loader.hpp"

namespace ddp::detail {

/// Why `dataset` cannot be kept on `device`; empty if it can. Ignores size limits.
std::string why_not_resident(const Dataset& dataset, at::Device device);
/// Whether a DataLoader with these options keeps it there. Throws SettingsError if
/// device_resident=on is impossible.
bool keeps_images_on_device(const Dataset& dataset, at::Device device,
                            const LoaderOptions& options);

/// Batches of these images; also a DeviceImageLoader. Throws SettingsError where why_not_resident()
/// has a reason.
std::unique_ptr<BatchSource<Batch>> make_resident_images(
    const std::shared_ptr<const Dataset>& dataset, const DistributedSampler& sampler,
    at::Device device, const LoaderOptions& options);

}  // namespace ddp::detail
