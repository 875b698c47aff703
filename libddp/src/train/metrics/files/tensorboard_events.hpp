// SPDX-License-Identifier: Apache-2.0
// TensorBoard's event files: records of TFRecord that hold messages of event.proto, summary.proto
// and the plugin "hparams". Only the fields that a run needs. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ddp::detail::tensorboard {

/// CRC-32C (Castagnoli).
uint32_t crc32c(std::string_view bytes);
/// A record of TFRecord: length, data, and the masked checksum of each.
std::string framed(std::string_view data);

/// A settings value as TensorBoard shows it: a number, true, false, or text.
struct Hparam {
  std::string name;
  std::string value;
};

/// Messages of one event, in protobuf's encoding. `step` counts finished steps.
struct EventTime {
  double unix_time = 0;
  int64_t step = 0;
};
std::string file_version_event(const EventTime& time);
/// SessionLog START: TensorBoard drops events of this step and later ones that it read before. It
/// ignores the first such event of a run.
std::string restart_event(const EventTime& time);
std::string scalars_event(const EventTime& time,
                          const std::vector<std::pair<std::string, double>>& scalars);
/// `markdown` is shown on the page Text.
std::string text_event(const EventTime& time, const std::string& tag, const std::string& markdown);
/// `name`: of the run, on the page HParams.
std::string hparams_event(const EventTime& time, const std::string& name,
                          const std::vector<Hparam>& hparams);

}  // namespace ddp::detail::tensorboard
