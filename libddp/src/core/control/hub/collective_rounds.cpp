// SPDX-License-Identifier: Apache-2.0
#include "core/control/hub/collective_rounds.hpp"

#include <utility>

#include "core/control/failure/failure_cause.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// A rank that gathers to others does not wait, so it may be some calls ahead.
constexpr std::size_t kMaxHeldBytes = 64 << 20;

std::string name_of_call(CollectiveKind kind, uint32_t root, const std::string& activity) {
  const bool rooted = kind == CollectiveKind::Broadcast || kind == CollectiveKind::Gather;
  return concat(to_string(kind), rooted ? concat(" (root ", root, ")") : "",
                activity.empty() ? "" : concat(" of '", activity, "'"));
}

bool leaves(CollectiveKind kind, const std::string& activity) {
  return kind == CollectiveKind::Close || activity == kCloseActivity;
}

std::vector<std::string> take_values(CollectiveKind kind, uint32_t root,
                                     std::vector<std::optional<std::string>>& all) {
  std::vector<std::string> values;
  if (kind == CollectiveKind::Broadcast) {
    values.push_back(std::move(*all[root]));
  } else if (kind == CollectiveKind::AllGather || kind == CollectiveKind::Gather) {
    for (auto& value : all) {
      values.push_back(std::move(*value));
    }
  }
  return values;
}

}  // namespace

CollectiveRounds::CollectiveRounds(const PeerTable& peers, std::chrono::milliseconds timeout)
    : peers_(peers),
      timeout_(timeout),
      num_calls_(static_cast<std::size_t>(peers.size())),
      num_held_bytes_(static_cast<std::size_t>(peers.size())) {}

// A call may open a round, which has a place for every rank.
std::size_t CollectiveRounds::held_bytes(const std::string& value) const {
  return value.size() + sizeof(Round) +
         static_cast<std::size_t>(peers_.size()) * sizeof(std::optional<std::string>);
}

std::string CollectiveRounds::why_invalid(int rank, const Contribution& contribution) const {
  const auto at = static_cast<std::size_t>(rank);
  if (contribution.sequence != num_calls_[at]) {
    return concat("gave its call number ", num_calls_[at], " the number ", contribution.sequence);
  }
  if (contribution.root >= static_cast<uint32_t>(peers_.size())) {
    return concat("called ", to_string(contribution.kind), " with root ", contribution.root,
                  " in a job of ", peers_.size(), " ranks");
  }
  if (num_held_bytes_[at] + held_bytes(contribution.value) > kMaxHeldBytes) {
    return concat("is so many collectives ahead of other ranks that their values exceed ",
                  kMaxHeldBytes, " bytes");
  }
  return {};
}

CollectiveRounds::Outcome CollectiveRounds::add(int rank, Contribution contribution,
                                                SteadyTime now) {
  num_calls_[static_cast<std::size_t>(rank)] = contribution.sequence + 1;
  auto [found, is_new] = rounds_.try_emplace(contribution.sequence);
  Round& round = found->second;
  if (is_new) {
    round.kind = contribution.kind;
    round.root = contribution.root;
    round.activity = contribution.activity;
    round.first_rank = rank;
    round.deadline = now + timeout_;
    round.values.resize(static_cast<std::size_t>(peers_.size()));
  }
  if (round.kind != contribution.kind || round.root != contribution.root ||
      round.activity != contribution.activity) {
    return {{}, describe_mismatch(rank, contribution, round)};
  }
  auto& value = round.values[static_cast<std::size_t>(rank)];
  if (value) {
    return {};  // cannot happen: every rank counts its own calls
  }
  value = std::move(contribution.value);
  num_held_bytes_[static_cast<std::size_t>(rank)] += held_bytes(*value);
  if (++round.num_arrived < peers_.size()) {
    return {};
  }
  for (std::size_t caller = 0; caller < round.values.size(); ++caller) {
    num_held_bytes_[caller] -= held_bytes(*round.values[caller]);
  }
  Result result{contribution.sequence, round.kind, round.root,
                take_values(round.kind, round.root, round.values)};
  rounds_.erase(found);
  return {std::move(result), {}};
}

std::string CollectiveRounds::describe_mismatch(int rank, const Contribution& contribution,
                                                const Round& round) const {
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
  const auto place = [this](int who) { return step_words(peers_.progress(who).step); };
  if (one.leaves && !other.leaves) {
    return concat(peers_.name(one.rank), " left", place(one.rank), " while ",
                  peers_.name(other.rank), " called the control plane's ", other.call,
                  place(other.rank), ". All ranks make the same calls in the same order");
  }
  return concat("ranks diverged: ", peers_.name(one.rank), " called ", one.call, place(one.rank),
                " where ", peers_.name(other.rank), " called ", other.call, place(other.rank),
                " on the control plane");
}

std::string CollectiveRounds::find_overdue(SteadyTime now) const {
  for (const auto& [sequence, round] : rounds_) {
    if (now >= round.deadline) {
      std::vector<int> missing;
      for (int rank = 0; rank < peers_.size(); ++rank) {
        if (!round.values[static_cast<std::size_t>(rank)]) {
          missing.push_back(rank);
        }
      }
      return concat("control plane: ", to_string(round.kind), " waited ", timeout_.count(),
                    " ms for rank ", list_ranks(missing));
    }
  }
  return {};
}

std::optional<PlaneCall> CollectiveRounds::pending_call(int rank) const {
  const auto found = rounds_.find(num_calls(rank) - 1);
  if (found == rounds_.end()) {
    return std::nullopt;
  }
  const auto& round = found->second;
  return PlaneCall{found->first, name_of_call(round.kind, round.root, round.activity),
                   leaves(round.kind, round.activity),
                   round.kind == CollectiveKind::Barrier && round.activity.empty()};
}

}  // namespace ddp::detail
