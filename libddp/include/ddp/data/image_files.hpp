// SPDX-License-Identifier: Apache-2.0
// Image files that a user names, prepared as the images of a data set.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ddp/data/dataset.hpp"

namespace ddp {

/// Opens JPEG, PNG and WebP files, recognised by their contents, as a data set. Its samples are
/// resized, cropped and normalised as those of make_dataset(options, Split::Test). The target of
/// sample i is i. `options` describe that data set, which has to be at options.path, but its
/// num_samples, num_classes and corrupt do not apply here. Throws SettingsError for unsuitable
/// settings, DataError for a file that does not exist or, when it is read, is no such image.
std::shared_ptr<Dataset> open_image_files(const DataOptions& options,
                                          const std::vector<std::string>& paths);

}  // namespace ddp
