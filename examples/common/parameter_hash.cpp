// SPDX-License-Identifier: Apache-2.0
#include "common/parameter_hash.hpp"

#include <torch/torch.h>

#include <cstdint>
#include <cstring>

namespace examples {
namespace {

/// FNV-1a over words of eight bytes, with a rotation so that high bits reach low ones.
class Hash {
 public:
  void add(const void* data, std::size_t num_bytes) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    for (; num_bytes >= sizeof(uint64_t); num_bytes -= sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, bytes, sizeof(word));
      bytes += sizeof(word);
      mix(word);
    }
    uint64_t rest = num_bytes;
    std::memcpy(&rest, bytes, num_bytes);
    mix(rest + num_bytes);
  }
  uint64_t value() const { return value_; }

 private:
  void mix(uint64_t word) {
    value_ = (value_ ^ word) * 1099511628211ULL;
    value_ = (value_ << 29) | (value_ >> 35);
  }
  uint64_t value_ = 14695981039346656037ULL;
};

}  // namespace

std::string parameter_hash(const ddp::NamedParameters& parameters) {
  Hash hash;
  for (const auto& [name, tensor] : parameters) {
    hash.add(name.data(), name.size());
    hash.add(tensor.sizes().data(), tensor.sizes().size() * sizeof(int64_t));
    const auto type = static_cast<int64_t>(tensor.scalar_type());
    hash.add(&type, sizeof(type));
    const auto values = tensor.detach().to(torch::kCPU).contiguous();
    hash.add(values.data_ptr(), values.nbytes());
  }
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text(16, '0');
  for (int i = 0; i < 16; ++i) {
    text[i] = kDigits[(hash.value() >> (60 - 4 * i)) & 0xF];
  }
  return text;
}

std::string common_parameter_hash(const ddp::NamedParameters& parameters,
                                  ddp::ControlPlane& control_plane) {
  return control_plane.require_equal("the hash of the parameters", parameter_hash(parameters));
}

}  // namespace examples
