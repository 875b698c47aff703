// SPDX-License-Identifier: Apache-2.0
// Reads files that may be links or named pipes.
#pragma once

#include <optional>
#include <string>

#include "ddp/detail/files.hpp"

namespace ddp::detail {

/// Whether to follow a symbolic link in the last part of a path.
enum class Links { Follow, Refuse };

/// Returns a descriptor for reading the regular file `path`. On failure returns -1 and sets `why`
/// and errno. Refuses other file types at once: a named pipe would wait for a writer.
int open_to_read(const std::string& path, std::string& why, Links links = Links::Follow);

/// Returns the first `limit` bytes of the regular file `path`, or the whole file if shorter. On
/// failure returns nothing and sets `why`.
std::optional<std::string> read_start(const std::string& path, std::size_t limit, std::string& why,
                                      Links links = Links::Follow);

}  // namespace ddp::detail
