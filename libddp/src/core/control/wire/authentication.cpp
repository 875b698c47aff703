// SPDX-License-Identifier: Apache-2.0
#include "core/control/wire/authentication.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "ddp/detail/check.hpp"

namespace ddp::detail {

std::string hmac_sha256(std::string_view key, std::string_view data) {
  std::string mac(kMacBytes, '\0');
  unsigned int size = 0;
  const auto* made = HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                          reinterpret_cast<const unsigned char*>(data.data()), data.size(),
                          reinterpret_cast<unsigned char*>(mac.data()), &size);
  DDP_CHECK(made != nullptr && size == kMacBytes, "HMAC-SHA256 failed");
  return mac;
}

bool equal_in_constant_time(std::string_view left, std::string_view right) {
  return left.size() == right.size() && CRYPTO_memcmp(left.data(), right.data(), left.size()) == 0;
}

std::string random_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  DDP_CHECK(
      RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(count)) == 1,
      "the system gave no random bytes");
  return bytes;
}

std::string to_hex(std::string_view bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : bytes) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

}  // namespace ddp::detail
