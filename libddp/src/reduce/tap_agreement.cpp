// SPDX-License-Identifier: Apache-2.0
#include "reduce/tap_agreement.hpp"

#include <ATen/ATen.h>

namespace ddp::detail {

bool is_3x3_filter(const at::Tensor& tensor) {
  return tensor.dim() == 4 && tensor.size(2) == 3 && tensor.size(3) == 3;
}

std::vector<ops::Taps> taps_of_any_rank(Communicator& communicator,
                                        const std::vector<ops::Taps>& own) {
  if (communicator.world_size() == 1) {
    return own;
  }
  constexpr size_t kNumTaps = 9;
  at::Tensor used = at::empty({static_cast<int64_t>(own.size() * kNumTaps)}, at::kByte);
  auto* bits = used.data_ptr<uint8_t>();
  for (size_t i = 0; i < own.size(); ++i) {
    for (size_t tap = 0; tap < kNumTaps; ++tap) {
      bits[i * kNumTaps + tap] = static_cast<uint8_t>((own[i] >> tap) & 1);
    }
  }
  const at::Tensor sent = used.to(communicator.device());
  communicator.all_reduce(sent, ReduceOp::Max)->wait();
  used = sent.cpu();
  bits = used.data_ptr<uint8_t>();
  std::vector<ops::Taps> taps(own.size(), 0);
  for (size_t i = 0; i < own.size(); ++i) {
    for (size_t tap = 0; tap < kNumTaps; ++tap) {
      taps[i] |= static_cast<ops::Taps>(bits[i * kNumTaps + tap] << tap);
    }
  }
  return taps;
}

SettingsError late_taps_error(const std::string& name, const std::string& consequence,
                              const std::string& where) {
  return SettingsError("optimizer.skip_dead_taps=true: taps of " + name +
                       " that no rank had read when the first step was made are read since, as "
                       "over larger images" +
                       consequence +
                       ": make the first step over the largest images, evaluate under "
                       "torch::NoGradGuard, or set it to false" +
                       where);
}

}  // namespace ddp::detail
