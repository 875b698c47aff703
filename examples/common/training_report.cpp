// SPDX-License-Identifier: Apache-2.0
#include "common/training_report.hpp"

#include <torch/torch.h>

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/text.hpp"

namespace examples {

void TrainingSummary::add_epoch(const ddp::EpochResult& epoch) {
  if (!first_epoch) {
    first_epoch = epoch;
  }
  last_epoch = epoch;
  if (std::isfinite(epoch.samples_per_second)) {
    timed_seconds_ += epoch.seconds;
    timed_samples_ += epoch.samples_per_second * epoch.seconds;
  }
}

double TrainingSummary::samples_per_second() const {
  return timed_seconds_ > 0 ? timed_samples_ / timed_seconds_ : 0;
}

std::string TrainingSummary::first_lines() const {
  std::string text;
  if (first_step > 0) {
    text += num_steps > 0
                ? ddp::concat("resumed         at step ", first_step, " of ", num_steps, '\n')
                : ddp::concat("evaluated       the best checkpoint, of ", first_step, " steps\n");
  }
  if (num_steps > 0 && first_step >= num_steps) {
    text +=
        "complete        nothing was left to train; a larger train.epochs or train.max_steps goes "
        "on, another checkpoint.dir starts over\n";
  }
  if (first_epoch && first_epoch->train_loss && last_epoch.train_loss) {
    text += format("train loss      %.4f in this run's first epoch, %.4f in its last\n",
                   *first_epoch->train_loss, *last_epoch.train_loss);
  }
  return text;
}

std::string format(const char* pattern, ...) {
  const ddp::detail::ClassicNumbers numbers;
  char text[512];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

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

NonFiniteLog::NonFiniteLog(const ddp::Optimizer& optimizer, const ddp::TrainOptions& train,
                           bool scales_loss)
    : optimizer_(optimizer),
      scales_loss_(scales_loss),
      consequence_(
          scales_loss ? "the updates were skipped and the loss scale was lowered"
          : train.non_finite == ddp::NonFinite::Skip
              ? "the updates were skipped (train.non_finite=skip); if this continues, "
                "lower lr_schedule.lr"
          : train.max_grad_norm > 0
              ? "the updates were applied; fix: lower lr_schedule.lr or train.max_grad_norm"
              : "the updates were applied; fix: lower lr_schedule.lr, or set "
                "train.max_grad_norm") {}

void NonFiniteLog::report(int64_t steps_done) {
  const auto found = optimizer_.non_finite_report();
  const int64_t count = found.num_scans - std::exchange(num_reported_, found.num_scans);
  if (count > 0) {
    ddp::log(scales_loss_ ? ddp::LogLevel::Info : ddp::LogLevel::Warning,
             ddp::concat("inf or NaN in the gradients of ", count, count == 1 ? " step" : " steps",
                         " up to step ", steps_done,
                         "; the first such parameter in the "
                         "last of them is ",
                         found.parameter, "; ", consequence_));
  }
}

}  // namespace examples
