// SPDX-License-Identifier: Apache-2.0
#include "train/graph/capture_agreement.hpp"

#include <algorithm>
#include <utility>

#include "core/failure_cause.hpp"
#include "core/message_codec.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {
namespace {

constexpr const char* kMark = "captured step";

// Reasons are shown in one line of the log.
std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

constexpr const char* kVariantFix =
    ". Shapes, numbers and modes must change in the same call on all ranks; fix: pass another "
    "StepNumbers::variant on all ranks in such calls (for example the global batch size), or set "
    "train.cuda_graph=off";

std::string describe(const CaptureReport& report) {
  return concat("batch ", report.shapes.empty() ? "without tensors" : report.shapes, ", variant ",
                report.variant);
}

}  // namespace

std::string encode(const CaptureReport& report) {
  auto message = report;
  message.reason = one_line(std::move(message.reason));
  return encode_message(std::pair(std::string(kMark), std::move(message)));
}

bool decode(const std::string& text, CaptureReport& report) {
  ByteReader reader(text);
  std::string mark;
  read_value(reader, mark);
  if (mark != kMark) {
    return false;
  }
  report = {};
  read_value(reader, report);
  return reader.finished();
}

std::string compare_captures(const std::vector<std::string>& texts, size_t own,
                             const std::string& name) {
  std::vector<CaptureReport> reports(texts.size());
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!decode(texts[rank], reports[rank])) {
      DDP_CHECK(rank != own);
      throw SettingsError(concat(name, ": this rank captures its call ", reports[own].call,
                                 ", and rank ", rank, " does not", kVariantFix));
    }
  }
  const auto& mine = reports[own];
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const auto& other = reports[rank];
    if (other.step_id != mine.step_id || other.call != mine.call || other.variant != mine.variant) {
      throw SettingsError(
          concat(name, ": this rank captures its call ", mine.call, " (", describe(mine),
                 "), rank ", rank, " call ", other.call, " (", describe(other), ')',
                 other.step_id == mine.step_id ? "" : " of another GraphedStep", kVariantFix));
    }
  }
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!reports[rank].reason.empty()) {
      return texts.size() == 1 ? reports[rank].reason
                               : concat("on rank ", rank, ": ", reports[rank].reason);
    }
  }
  const auto& first = reports[0].operations;
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    const auto& other = reports[rank].operations;
    if (other.size() != first.size()) {
      return concat("the ranks captured different steps: rank ", rank, " calls ", other.size(),
                    " collectives, rank 0 calls ", first.size(),
                    "; run the same step on all ranks");
    }
    const auto [here, there] = std::mismatch(first.begin(), first.end(), other.begin());
    if (here != first.end()) {
      return concat("the ranks captured different steps: collective ", here - first.begin() + 1,
                    " of ", first.size(), " is ", *there, " on rank ", rank, " and ", *here,
                    " on rank 0; run the same step on all ranks");
    }
  }
  return {};
}

bool require_no_missed_capture(const std::vector<std::string>& announcements, size_t own,
                               int64_t step_id, int64_t calls_done, int64_t last_captured,
                               const std::string& name, const std::string& shapes) {
  bool is_pending = false;
  for (size_t rank = 0; rank < announcements.size(); ++rank) {
    CaptureReport report;
    if (rank == own || !decode(announcements[rank], report) || report.step_id != step_id ||
        report.call <= last_captured) {
      continue;
    }
    if (report.call > calls_done) {
      is_pending = true;
      continue;
    }
    throw SettingsError(concat(name, ": rank ", rank, " captures its call ", report.call, " (",
                               describe(report), ") and waits for all ranks; call ", report.call,
                               " was not captured on rank ", own, ", whose last batch was ", shapes,
                               kVariantFix));
  }
  return is_pending;
}

CaptureAgreement::CaptureAgreement(ControlPlane& plane, int64_t step_id, std::string name)
    : plane_(plane),
      step_id_(step_id),
      name_(std::move(name)),
      board_(step_id != 0 ? dynamic_cast<AnnouncementBoard*>(&plane) : nullptr) {}

void CaptureAgreement::check() {
  if (ended_) {
    return;
  }
  if (plane_.failed()) {
    throw PeerLostError(plane_.failure().to_line());
  }
  check_missed_captures();
}

void CaptureAgreement::check_missed_captures() {
  if (board_ == nullptr || board_->announcements_version() == checked_version_) {
    return;
  }
  const auto version = board_->announcements_version();
  const bool is_pending =
      require_no_missed_capture(board_->announcements(), static_cast<size_t>(plane_.rank()),
                                step_id_, calls_done_, last_captured_, name_, last_shapes_);
  if (!is_pending) {
    checked_version_ = version;
  }
}

CaptureReport CaptureAgreement::begin_capture(uint64_t call, int64_t variant, std::string shapes) {
  CaptureReport report{.step_id = step_id_,
                       .call = static_cast<int64_t>(call),
                       .variant = variant,
                       .shapes = std::move(shapes)};
  if (board_ != nullptr) {
    board_->announce(encode(report));
  }
  return report;
}

std::string CaptureAgreement::agree(const CaptureReport& report) {
  const bool is_collective = step_id_ != 0;
  if (!is_collective && report.reason.empty() && !report.operations.empty()) {
    return "the step calls collectives, although GraphedStepOptions::collective is false";
  }
  if (plane_.world_size() == 1 || !is_collective) {
    return report.reason;
  }
  return compare_captures(plane_.all_gather(encode(report)), static_cast<size_t>(plane_.rank()),
                          name_);
}

}  // namespace ddp::detail
