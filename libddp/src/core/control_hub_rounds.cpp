// SPDX-License-Identifier: Apache-2.0
// Rank 0's part in control-plane collectives and deadlock detection.
#include <algorithm>

#include "core/control_hub.hpp"
#include "core/control_verdict.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

// A waiting rank is reported after this many heartbeats, once per wait.
constexpr int kReportAfterHeartbeats = 6;
constexpr std::size_t kMaxNamed = 4;

std::string name_of_call(CollectiveKind kind, uint32_t root, const std::string& activity) {
  const bool rooted = kind == CollectiveKind::Broadcast || kind == CollectiveKind::Gather;
  return concat(to_string(kind), rooted ? concat(" (root ", root, ")") : "",
                activity.empty() ? "" : concat(" of '", activity, "'"));
}

bool leaves(CollectiveKind kind, const std::string& activity) {
  return kind == CollectiveKind::Close || activity == kCloseActivity;
}

}  // namespace

void ControlHub::contribute(Contribution contribution) {
  note_contribution(0, std::move(contribution));
}

void ControlHub::note_contribution(int rank, Contribution contribution) {
  peers_[static_cast<std::size_t>(rank)].num_calls = contribution.sequence + 1;
  auto [found, is_new] = rounds_.try_emplace(contribution.sequence);
  Round& round = found->second;
  if (is_new) {
    round.kind = contribution.kind;
    round.root = contribution.root;
    round.activity = contribution.activity;
    round.first_rank = rank;
    round.deadline = state_.monitor.now() + state_.options.collective_timeout;
    round.values.resize(static_cast<std::size_t>(state_.world_size));
  }
  if (round.kind != contribution.kind || round.root != contribution.root ||
      round.activity != contribution.activity) {
    fail_round(rank, contribution, round);
    return;
  }
  auto& value = round.values[static_cast<std::size_t>(rank)];
  if (value) {
    return;  // cannot happen: every rank counts its own calls
  }
  value = std::move(contribution.value);
  if (++round.num_arrived == state_.world_size) {
    finish_round(contribution.sequence, round);
    rounds_.erase(found);
  }
}

void ControlHub::fail_round(int rank, const Contribution& contribution, const Round& round) {
  struct Caller {
    int rank;
    std::string call;
    bool leaves;
  };
  Caller one{rank, name_of_call(contribution.kind, contribution.root, contribution.activity),
             leaves(contribution.kind, contribution.activity)};
  Caller other{round.first_rank, name_of_call(round.kind, round.root, round.activity),
               leaves(round.kind, round.activity)};
  if (other.leaves && !one.leaves) {
    std::swap(one, other);
  }
  const auto place = [this](int who) {
    const auto progress = progress_of(who);
    return progress.step < 0 ? std::string(" before the first step")
                             : concat(" at step ", progress.step);
  };
  if (one.leaves && !other.leaves) {
    fail_job(ExitCode::Mismatch,
             concat(name_of(one.rank), " left", place(one.rank), " while ", name_of(other.rank),
                    " called the control plane's ", other.call, place(other.rank),
                    ". All ranks make the same calls in the same order"));
    return;
  }
  fail_job(ExitCode::Mismatch,
           concat("ranks took different ways: ", name_of(one.rank), " called ", one.call,
                  place(one.rank), " where ", name_of(other.rank), " called ", other.call,
                  place(other.rank), " on the control plane"));
}

// Sends the values to all ranks, or only to the root of a gather.
void ControlHub::finish_round(uint64_t sequence, Round& round) {
  if (round.kind == CollectiveKind::Close) {
    state_.monitor.set_closing();
  }
  std::vector<std::string_view> values;
  if (round.kind == CollectiveKind::Broadcast) {
    values.emplace_back(*round.values[round.root]);
  } else if (round.kind == CollectiveKind::AllGather || round.kind == CollectiveKind::Gather) {
    for (const auto& value : round.values) {
      values.emplace_back(*value);
    }
  }
  const bool to_all = round.kind != CollectiveKind::Gather;
  if (to_all || round.root != 0) {
    for (const auto& message : encode_result(sequence, values)) {
      to_all ? broadcast_frame(FrameType::Result, message)
             : send_to(static_cast<int>(round.root), FrameType::Result, message);
    }
  }
  if (to_all || round.root == 0) {
    ResultPart own;
    own.sequence = sequence;
    own.num_values = static_cast<uint32_t>(values.size());
    own.values.assign(values.begin(), values.end());
    if (state_.replies.add_result(std::move(own))) {
      state_.monitor.notify();
    }
  }
}

void ControlHub::send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) {
  note_exchange(0, {key, num_ranks, value});
}

// Collects the values of a key and sends all of them to the contributors.
void ControlHub::note_exchange(int rank, ExchangeValue value) {
  auto& values = exchanges_[value.key];
  values[rank] = std::move(value.value);
  if (values.size() < value.num_ranks) {
    return;
  }
  ExchangeResult result{value.key, std::move(exchanges_.extract(value.key).mapped())};
  const auto payload = encode_exchanged(result);
  for (const auto& entry : result.values) {
    send_to(entry.first, FrameType::Exchanged, payload);
  }
  if (result.values.contains(0)) {
    state_.replies.add_exchanged(result.key, std::move(result.values));
    state_.monitor.notify();
  }
}

void ControlHub::note_position(int rank, RankPosition position) {
  auto& peer = peers_[static_cast<std::size_t>(rank)];
  if (!position.waits()) {
    peer.position.reset();
    return;
  }
  if (!peer.position || *peer.position != position) {
    peer.waits_since = state_.monitor.now();
    peer.wait_is_reported = false;
    positions_are_new_ = true;
  }
  peer.position = std::move(position);
}

void ControlHub::judge() {
  if (!std::exchange(positions_are_new_, false)) {
    return;
  }
  std::vector<RankView> views(peers_.size());
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    views[rank].host = peers_[rank].host;
    views[rank].position = peers_[rank].position;
    views[rank].num_calls = peers_[rank].num_calls;
    const auto round = rounds_.find(peers_[rank].num_calls - 1);
    if (round != rounds_.end()) {
      const auto& call = round->second;
      views[rank].call = {round->first, name_of_call(call.kind, call.root, call.activity),
                          leaves(call.kind, call.activity)};
    }
  }
  if (const auto verdict = find_deadlock(views); !verdict.empty()) {
    fail_job(ExitCode::Mismatch, verdict);
  }
}

// Not an error yet: a rank may save, load or evaluate for a long time.
void ControlHub::report_waits(SteadyTime now) {
  const auto limit = state_.options.heartbeat_interval * kReportAfterHeartbeats;
  std::vector<int> waiting;
  bool report = false;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    auto& peer = peers_[rank];
    if (peer.position && now - peer.waits_since >= limit) {
      waiting.push_back(static_cast<int>(rank));
      const bool is_new = !std::exchange(peer.wait_is_reported, true);
      report = report || is_new;
    }
  }
  if (report) {
    const auto busy = tell_busy(waiting);
    const auto verb =
        waiting.size() == 1 ? " waits" : concat(" and ", waiting.size() - 1, " more wait");
    log_warning(concat(name_of(waiting.front()), verb, " for ", limit.count(), " ms or longer",
                       busy.empty() ? "" : "; meanwhile " + busy));
  }
}

std::string ControlHub::tell_busy(const std::vector<int>& but) const {
  std::string text;
  std::size_t num_busy = 0;
  for (int rank = 0; rank < state_.world_size; ++rank) {
    if (std::find(but.begin(), but.end(), rank) != but.end() ||
        peers_[static_cast<std::size_t>(rank)].position) {
      continue;
    }
    if (++num_busy <= kMaxNamed) {
      const auto [step, where] = progress_of(rank);
      text += concat(num_busy == 1 ? "" : ", ", name_of(rank), " is",
                     step < 0 ? std::string(" before the first step") : concat(" at step ", step),
                     where.empty() ? "" : " in " + where);
    }
  }
  return num_busy > kMaxNamed ? concat(text, ", … (", num_busy, " ranks in all)") : text;
}

Progress ControlHub::progress_of(int rank) const {
  return rank == 0 ? state_.progress.get() : peers_[static_cast<std::size_t>(rank)].progress;
}

std::string ControlHub::name_of(int rank) const {
  return concat("rank ", rank, " (", peers_[static_cast<std::size_t>(rank)].host, ")");
}

}  // namespace ddp::detail
