// SPDX-License-Identifier: Apache-2.0
#include "core/control/hub/deadlock.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "core/control/failure/failure_cause.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

constexpr const char* kFix =
    ". All ranks make the same calls in the same order; where only some ranks change "
    "requires_grad, "
    "change it on all; where they have different numbers of batches, use ddp::join or a "
    "DistributedSampler";

std::string describe(const std::vector<RankSnapshot>& ranks, std::size_t rank) {
  return rank_words(static_cast<int64_t>(rank), ranks[rank].host);
}

std::string place_of(const RankPosition& position) {
  return place_words(position.step, position.where);
}

// "all_reduce #12 (sum of 1000 Float)". Only the pending collective's text is known.
std::string operation_of(const GroupPosition& group, uint64_t number) {
  const auto text = number == group.pending ? group.operation : "collective";
  const auto end = std::min(text.find(' '), text.size());
  return with_label(concat(group.is_check ? "the check of " : "", text.substr(0, end), " #", number,
                           text.substr(end)),
                    number == group.pending ? group.label : "");
}

// A rank in a control-plane call, according to its own report.
bool is_held(const RankSnapshot& rank) {
  return rank.call && rank.position && rank.position->plane_call == rank.call->sequence + 1;
}

// Whether only the thread in the control-plane call could call the next collective of the group. A
// thread that has called nothing yet is unknown, so the program's own barrier() proves nothing, nor
// does a group in which this rank has called nothing.
bool holds_group(const RankSnapshot& rank, const GroupPosition& group) {
  return rank.call->leaves ||
         (rank.position->one_thread && !rank.call->is_own_barrier && group.num_called > 0);
}

// The held rank with the fewest collectives in each group.
using Behind = std::map<std::string, std::pair<std::size_t, uint64_t>>;

Behind find_behind(const std::vector<RankSnapshot>& ranks, bool leaves) {
  Behind behind;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& view = ranks[rank];
    if (!is_held(view) || view.call->leaves != leaves) {
      continue;
    }
    for (const auto& group : view.position->groups) {
      if (!holds_group(view, group)) {
        continue;
      }
      const auto [found, is_new] = behind.try_emplace(group.id, rank, group.num_called);
      if (!is_new && group.num_called < found->second.second) {
        found->second = {rank, group.num_called};
      }
    }
  }
  return behind;
}

Deadlock find_departed(const std::vector<RankSnapshot>& ranks) {
  const auto behind = find_behind(ranks, /*leaves=*/true);
  for (std::size_t rank = 0; !behind.empty() && rank < ranks.size(); ++rank) {
    for (const auto& group : ranks[rank].position.value_or(RankPosition{}).groups) {
      const auto found = behind.find(group.id);
      if (found != behind.end() && group.pending > found->second.second) {
        const auto left = found->second.first;
        return {concat(describe(ranks, left), " left", place_of(*ranks[left].position), " after ",
                       found->second.second, " collectives, while ", describe(ranks, rank),
                       " waits", place_of(*ranks[rank].position), " in ",
                       operation_of(group, group.pending), kFix),
                {static_cast<int>(left)},
                group.id};
      }
    }
  }
  return {};
}

Deadlock find_crossed_waits(const std::vector<RankSnapshot>& ranks) {
  const auto behind = find_behind(ranks, /*leaves=*/false);
  for (std::size_t rank = 0; !behind.empty() && rank < ranks.size(); ++rank) {
    const auto& view = ranks[rank];
    if (!view.position || !view.position->one_thread) {
      continue;
    }
    for (const auto& group : view.position->groups) {
      const auto found = behind.find(group.id);
      if (found == behind.end() || group.waited <= found->second.second) {
        continue;
      }
      const auto other = found->second.first;
      const bool is_missed = view.num_calls <= ranks[other].call->sequence;
      if (is_missed) {
        return {concat("ranks diverged: ", describe(ranks, other), " waits",
                       place_of(*ranks[other].position), " in the control plane's ",
                       ranks[other].call->name, " after ", found->second.second,
                       " collectives, while ", describe(ranks, rank), " waits",
                       place_of(*view.position), " in ", operation_of(group, group.waited), kFix),
                {static_cast<int>(other)},
                group.id};
      }
    }
  }
  return {};
}

Deadlock find_different_operations(const std::vector<RankSnapshot>& ranks) {
  std::map<std::pair<std::string, uint64_t>, std::pair<std::size_t, std::string>> pending;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!ranks[rank].position) {
      continue;
    }
    for (const auto& group : ranks[rank].position->groups) {
      if (group.pending == 0 || group.is_check) {
        continue;
      }
      const auto [found, is_new] =
          pending.try_emplace({group.id, group.pending}, rank, group.operation);
      const auto& [other, operation] = found->second;
      if (!is_new && operation != group.operation) {
        return {
            concat("ranks diverged: ", describe(ranks, other), " waits",
                   place_of(*ranks[other].position), " in ",
                   operation_of(*ranks[other].position->find(group.id), group.pending), ", while ",
                   describe(ranks, rank), " waits", place_of(*ranks[rank].position), " in ",
                   operation_of(group, group.pending), " of the same communicator", kFix),
            {static_cast<int>(other), static_cast<int>(rank)},
            group.id};
      }
    }
  }
  return {};
}

}  // namespace

Deadlock prove_deadlock(const std::vector<RankSnapshot>& ranks) {
  for (const auto find : {find_departed, find_different_operations, find_crossed_waits}) {
    if (auto deadlock = find(ranks); !deadlock.text.empty()) {
      return deadlock;
    }
  }
  return {};
}

std::string find_deadlock(const std::vector<RankSnapshot>& ranks) {
  return prove_deadlock(ranks).text;
}

}  // namespace ddp::detail
