// SPDX-License-Identifier: Apache-2.0
#include "core/control/doctor/diagnosis.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "core/control/doctor/group_members.hpp"
#include "core/control/failure/failure_cause.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// A rank that waits uses less of a core, one that computes more.
constexpr uint32_t kComputesPercent = 50;

std::string place_words(int64_t step, const std::string& where) {
  return concat(step_words(step), where.empty() ? "" : " in " + where);
}

std::string name_of(const std::string& operation) {
  return operation.substr(0, operation.find(' '));
}

// The ranks whose call differs from that of most ranks; all callers if no call has most.
std::vector<int> minority_of(const GroupMembers& members, uint64_t number) {
  std::map<std::pair<std::string, std::string>, std::vector<int>> callers;
  std::size_t largest = 0;
  std::vector<int> all;
  for (const auto& member : members) {
    if (const auto found = member.calls.find(number); found != member.calls.end()) {
      auto& ranks = callers[{found->second.operation, found->second.label}];
      ranks.push_back(member.rank);
      largest = std::max(largest, ranks.size());
      all.push_back(member.rank);
    }
  }
  std::set<int> minority;
  for (const auto& [call, ranks] : callers) {
    if (ranks.size() < largest) {
      minority.insert(ranks.begin(), ranks.end());
    }
  }
  return minority.empty() ? all : std::vector<int>(minority.begin(), minority.end());
}

class Diagnosis {
 public:
  Diagnosis(const std::vector<RankEvidence>& evidence, std::chrono::milliseconds min_wait)
      : evidence_(evidence) {
    for (int rank = 0; rank < static_cast<int>(evidence.size()); ++rank) {
      const auto& report = at(rank).report;
      for (std::size_t i = 0; report && i < report->position.groups.size(); ++i) {
        const auto& group = report->position.groups[i];
        groups_[group.id].emplace_back(rank, group, report->histories[i], at(rank).waited,
                                       min_wait);
      }
    }
  }

  Verdict find() const {
    if (auto verdict = find_stopped()) {
      return *verdict;
    }
    if (auto verdict = find_lost()) {
      return *verdict;
    }
    if (auto verdict = find_silent()) {
      return *verdict;
    }
    for (const auto finder : {&Diagnosis::find_other_call, &Diagnosis::find_other_graph,
                              &Diagnosis::find_absent, &Diagnosis::find_unfinished}) {
      for (const auto& [id, members] : groups_) {
        if (auto verdict = (this->*finder)(members)) {
          return *verdict;
        }
      }
    }
    return find_plane_wait();
  }

 private:
  const RankEvidence& at(int rank) const { return evidence_[static_cast<std::size_t>(rank)]; }
  std::string name(int rank) const {
    return at(rank).host.empty() ? concat("rank ", rank)
                                 : concat("rank ", rank, " (", at(rank).host, ")");
  }
  // "rank 3 (node2) (and ranks 4-7)"
  std::string names(const std::vector<int>& ranks) const {
    return concat(name(ranks.front()),
                  ranks.size() == 1
                      ? ""
                      : concat(" (and ", rank_words({ranks.begin() + 1, ranks.end()}), ")"));
  }
  template <typename Condition>
  std::vector<int> ranks_where(const Condition& condition) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < static_cast<int>(evidence_.size()); ++rank) {
      if (condition(at(rank))) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  }

  // "; ranks 0-2 wait since 31 s"
  static std::string waiting_words(const GroupMembers& members, const ReportedCall& call) {
    std::vector<int> ranks;
    int64_t longest = 0;
    for (const auto& member : members) {
      if (member.waits_in(call)) {
        ranks.push_back(member.rank);
        longest = std::max(longest, member.pending->waited_ms);
      }
    }
    return concat("; ", rank_words(ranks), ranks.size() == 1 ? " waits" : " wait", " since ",
                  seconds_words(longest));
  }
  // For a verdict about a process: who waits, in any communicator.
  std::string any_waiting_words() const {
    for (const auto& [id, members] : groups_) {
      if (const auto* waiting = find_earliest(members)) {
        return concat(waiting_words(members, *waiting->pending), " in ", waiting->pending->words());
      }
    }
    return "";
  }
  std::string last_seen_words(const RankEvidence& rank) const {
    return concat("last seen ", seconds_words(rank.silence.count()), " ago",
                  place_words(rank.last.step, rank.last.where));
  }

  std::optional<Verdict> find_stopped() const {
    const auto stopped = ranks_where([](const auto& rank) {
      return !rank.report && (rank.process_state == 'T' || rank.process_state == 't');
    });
    if (stopped.empty()) {
      return std::nullopt;
    }
    const auto& rank = at(stopped.front());
    return Verdict{
        VerdictKind::Stopped, false, stopped,
        concat(names(stopped), " is stopped by ",
               rank.process_state == 't' ? "a debugger" : "SIGSTOP", " (`kill -CONT ", rank.process,
               "` resumes it), ", last_seen_words(rank), any_waiting_words())};
  }

  std::optional<Verdict> find_lost() const {
    const auto lost = ranks_where([](const auto& rank) { return !rank.is_connected; });
    if (lost.empty()) {
      return std::nullopt;
    }
    return Verdict{
        VerdictKind::Lost, false, lost,
        concat(names(lost), " is gone, ", last_seen_words(at(lost.front())), any_waiting_words())};
  }

  // A rank whose connection is open and that does not answer.
  std::optional<Verdict> find_silent() const {
    const auto silent = ranks_where([](const auto& rank) { return !rank.report; });
    if (silent.empty()) {
      return std::nullopt;
    }
    const auto& rank = at(silent.front());
    const auto on_host = ranks_where([&](const auto& other) { return other.host == rank.host; });
    const bool host_answers =
        std::any_of(on_host.begin(), on_host.end(), [&](int other) { return at(other).report; });
    const auto end = concat(", ", last_seen_words(rank), any_waiting_words());
    if (host_answers) {
      return Verdict{
          VerdictKind::Stopped, false, silent,
          concat(names(silent), " does not answer, while other ranks of ", rank.host,
                 " do: process ", rank.process, " is stopped, or hangs in the kernel", end)};
    }
    return Verdict{VerdictKind::DeadLink, false, on_host,
                   concat("rank 0 (", at(0).host, ") hears nothing from ", rank.host, " (",
                          rank_words(on_host),
                          "): its processes are stopped, or the host or its network is down", end)};
  }

  // Ranks whose calls with one number differ.
  std::optional<Verdict> find_other_call(const GroupMembers& members) const {
    for (const auto& waiting : members) {
      if (!waiting.pending || !waiting.is_counted) {
        continue;
      }
      for (const auto& other : members) {
        const auto found = other.calls.find(waiting.pending->number);
        if (other.is_counted && found != other.calls.end() &&
            !found->second.fits(*waiting.pending)) {
          return differing_calls(members, waiting, other, found->second);
        }
      }
    }
    return std::nullopt;
  }

  Verdict differing_calls(const GroupMembers& members, const GroupMember& waiting,
                          const GroupMember& other, const ReportedCall& theirs) const {
    const auto& mine = *waiting.pending;
    const bool is_swapped =
        other.calls_elsewhere(mine, mine.number) && waiting.calls_elsewhere(theirs, theirs.number);
    auto kind = VerdictKind::OtherSize;
    const char* what = "call one operation with different sizes, dtypes or roots";
    if (is_swapped || theirs.operation == mine.operation) {
      kind = VerdictKind::OtherOrder;
      what = "call collectives in different orders";
    } else if (name_of(theirs.operation) != name_of(mine.operation)) {
      kind = VerdictKind::OtherOperation;
      what = "call different operations";
    }
    return {kind, false, minority_of(members, mine.number),
            concat(name(waiting.rank), " and ", name(other.rank), " ", what, ": rank ",
                   waiting.rank, " ", mine.words(), ", rank ", other.rank, " ", theirs.words(),
                   waiting_words(members, mine))};
  }

  // Where ranks replay graphs, numbers tell nothing: two ranks wait in different calls, and neither
  // has already ended the replay in which the other one waits.
  std::optional<Verdict> find_other_graph(const GroupMembers& members) const {
    const auto has_passed = [](const GroupMember& member, const ReportedCall& call) {
      return call.replay && member.has_entered(call);
    };
    for (const auto& waiting : members) {
      if (!waiting.pending || waiting.is_counted) {
        continue;
      }
      const auto& call = *waiting.pending;
      for (const auto& other : members) {
        if (other.pending && !other.pending->fits(call) && !has_passed(other, call) &&
            !has_passed(waiting, *other.pending)) {
          return Verdict{
              VerdictKind::OtherGraph,
              false,
              {waiting.rank, other.rank},
              concat(name(waiting.rank), " and ", name(other.rank), " run different steps: rank ",
                     waiting.rank, " waits in ", call.words(), ", rank ", other.rank, " in ",
                     other.pending->words(), waiting_words(members, call))};
        }
      }
    }
    return std::nullopt;
  }

  std::optional<Verdict> find_absent(const GroupMembers& members) const {
    const auto* waiting = find_earliest(members);
    if (waiting == nullptr) {
      return std::nullopt;
    }
    const auto& call = *waiting->pending;
    std::vector<int> absent;
    for (const auto& member : members) {
      if (!member.has_entered(call)) {
        absent.push_back(member.rank);
      }
    }
    if (absent.empty()) {
      return std::nullopt;
    }
    const auto [kind, place] = place_of(absent.front());
    return Verdict{kind, false, absent,
                   concat(names(absent), " did not enter ", call.words(), "; ", place,
                          waiting_words(members, call))};
  }

  // Where a rank is that others wait for: "it waits in the loader for batch 406 of epoch 0".
  std::pair<VerdictKind, std::string> place_of(int rank) const {
    const auto& evidence = at(rank);
    const auto& [step, where, plane_call, one_thread, groups] = evidence.report->position;
    constexpr std::string_view kFrozenActivity = "requires_grad of ";
    constexpr std::string_view kLoader = "loader, waiting for ";
    if (const auto found = where.find(kFrozenActivity); found != std::string::npos) {
      return {VerdictKind::Frozen,
              concat("it changed requires_grad of ", where.substr(found + kFrozenActivity.size()),
                     ", which the others did not", step_words(step))};
    }
    if (plane_call != 0 && evidence.call) {
      return evidence.call->leaves
                 ? std::pair(VerdictKind::Left, concat("it left", step_words(step)))
                 : std::pair(VerdictKind::Absent,
                             concat("it waits", step_words(step), " in the control plane's ",
                                    evidence.call->name));
    }
    for (const auto& [id, members] : groups_) {
      for (const auto& member : members) {
        if (member.rank == rank && member.pending) {
          return {VerdictKind::Absent, concat("it waits", step_words(step), " in ",
                                              member.pending->words(), " of communicator ", id)};
        }
      }
    }
    if (const auto found = where.find(kLoader); found != std::string::npos) {
      return {VerdictKind::Absent, concat("it waits", step_words(step), " in the loader for ",
                                          where.substr(found + kLoader.size()))};
    }
    const auto load = evidence.report->cpu_percent;
    return {load >= kComputesPercent ? VerdictKind::Computes : VerdictKind::Absent,
            concat("it ", load >= kComputesPercent ? "computes" : "is", place_words(step, where),
                   " (", load, " % of a core)")};
  }

  // All ranks of the communicator entered one collective.
  std::optional<Verdict> find_unfinished(const GroupMembers& members) const {
    const auto* waiting = find_earliest(members);
    if (waiting == nullptr) {
      return std::nullopt;
    }
    const auto& call = *waiting->pending;
    std::vector<int> ended, pending;
    for (const auto& member : members) {
      const auto found = member.calls.find(call.number);
      const bool has_ended = found == member.calls.end() || found->second.has_ended;
      if (member.pending && member.pending->fits(call)) {
        pending.push_back(member.rank);
      } else if (member.is_counted ? has_ended : call.replay && !member.pending) {
        ended.push_back(member.rank);
      }
    }
    if (!ended.empty()) {
      return Verdict{VerdictKind::DeadLink, false, pending,
                     concat(rank_words(ended), " ended ", call.words(), ", and ", names(pending),
                            " did not: data between them does not arrive, or its device hangs",
                            waiting_words(members, call))};
    }
    return Verdict{VerdictKind::NothingCertain,
                   false,
                   {},
                   concat("all ranks entered ", call.words(),
                          ", and none ended it: a kernel before it still runs, or a link between "
                          "them is down",
                          waiting_words(members, call))};
  }

  // No rank waits in a collective of a communicator.
  Verdict find_plane_wait() const {
    const auto calls = [](const auto& rank) { return rank.report->position.plane_call != 0; };
    const auto waiting = ranks_where(calls);
    const auto busy = ranks_where([&](const auto& rank) { return !calls(rank); });
    if (waiting.empty() || busy.empty()) {
      const auto& position = at(0).report->position;
      return {VerdictKind::NothingCertain,
              false,
              {},
              concat("no rank waits for another one; ", name(0), " is",
                     place_words(position.step, position.where))};
    }
    const auto& first = at(waiting.front());
    const auto [kind, place] = place_of(busy.front());
    return {kind, false, busy,
            concat(names(busy), " did not enter the control plane's ",
                   first.call ? first.call->name : "call", "; ", place, "; ", rank_words(waiting),
                   waiting.size() == 1 ? " waits" : " wait", " since ",
                   seconds_words(first.waited.count()))};
  }

  const std::vector<RankEvidence>& evidence_;
  std::map<std::string, GroupMembers> groups_;  // by id
};

}  // namespace

const char* to_string(VerdictKind kind) {
  switch (kind) {
    case VerdictKind::NothingCertain:
      return "nothing certain";
    case VerdictKind::Absent:
      return "absent";
    case VerdictKind::Left:
      return "left";
    case VerdictKind::Frozen:
      return "frozen parameter";
    case VerdictKind::Computes:
      return "computes";
    case VerdictKind::OtherOperation:
      return "other operation";
    case VerdictKind::OtherSize:
      return "other size or dtype";
    case VerdictKind::OtherOrder:
      return "other order";
    case VerdictKind::OtherGraph:
      return "other graph";
    case VerdictKind::Stopped:
      return "stopped process";
    case VerdictKind::DeadLink:
      return "dead link";
    case VerdictKind::Lost:
      return "lost";
  }
  return "?";
}

Verdict diagnose(const std::vector<RankEvidence>& evidence, std::chrono::milliseconds min_wait) {
  std::vector<RankSnapshot> snapshots;
  for (const auto& rank : evidence) {
    std::optional<RankPosition> position;
    if (rank.report && rank.report->position.waits()) {
      position = rank.report->position;
    }
    snapshots.push_back({rank.host, rank.call, rank.num_calls, std::move(position)});
  }
  auto verdict = Diagnosis(evidence, min_wait).find();
  verdict.is_certain = !find_deadlock(snapshots).empty();
  return verdict;
}

}  // namespace ddp::detail
