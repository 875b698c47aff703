// SPDX-License-Identifier: Apache-2.0
// HMAC-SHA256 and random bytes, by OpenSSL's libcrypto.
#pragma once

#include <string>
#include <string_view>

namespace ddp::detail {

inline constexpr std::size_t kMacBytes = 32;

/// Returns kMacBytes bytes.
std::string hmac_sha256(std::string_view key, std::string_view data);

/// Compares in a time that does not depend on the position of a difference.
bool equal_in_constant_time(std::string_view left, std::string_view right);

/// Draws from the system's cryptographic random generator.
std::string random_bytes(std::size_t count);

std::string to_hex(std::string_view bytes);

}  // namespace ddp::detail
