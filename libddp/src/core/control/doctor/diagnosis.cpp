// SPDX-License-Identifier: Apache-2.0
#include "core/control/doctor/diagnosis.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/control/doctor/group_members.hpp"
#include "core/control/failure/failure_cause.hpp"
#include "core/launch/place_in_loop.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// A rank that waits uses less of a core, one that computes more.
constexpr uint32_t kComputesPercent = 50;
// Data that ranks wait for since less may still be on its way.
constexpr int64_t kLinkWaitMs = 1000;

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

// Whether the deadlock is what the verdict says. Verdicts on processes are of no communicator.
bool proves(const Deadlock& deadlock, const Verdict& verdict) {
  const auto& ranks = verdict.ranks;
  return verdict.kind != VerdictKind::DeadLink && !deadlock.text.empty() &&
         deadlock.group == verdict.group && std::any_of(ranks.begin(), ranks.end(), [&](int rank) {
           return std::find(deadlock.ranks.begin(), deadlock.ranks.end(), rank) !=
                  deadlock.ranks.end();
         });
}

class Diagnosis {
 public:
  Diagnosis(const std::vector<RankEvidence>& evidence, const DiagnosisLimits& limits)
      : evidence_(evidence), limits_(limits) {
    for (int rank = 0; rank < static_cast<int>(evidence.size()); ++rank) {
      const auto& report = at(rank).report;
      for (std::size_t i = 0; report && i < report->position.groups.size(); ++i) {
        const auto& group = report->position.groups[i];
        groups_[group.id].emplace_back(rank, group, report->histories[i], at(rank).waited,
                                       limits.min_wait);
      }
    }
  }

  Verdict find() const {
    for (const auto finder :
         {&Diagnosis::find_stopped, &Diagnosis::find_lost, &Diagnosis::find_silent}) {
      if (auto verdict = (this->*finder)()) {
        return *verdict;
      }
    }
    auto verdict = find_in_groups().value_or(Verdict{});
    if (verdict.text.empty()) {
      verdict = find_plane_wait();
    }
    if (const auto late = ranks_where([](const auto& rank) { return !rank.report; });
        !late.empty()) {
      verdict.text += concat("; ", rank_words(late), " did not answer in time");
    }
    return verdict;
  }

 private:
  const RankEvidence& at(int rank) const { return evidence_[static_cast<std::size_t>(rank)]; }
  std::string name(int rank) const { return rank_words(rank, at(rank).host); }
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

  // The first verdict that names ranks, else the first.
  std::optional<Verdict> find_in_groups() const {
    std::optional<Verdict> uncertain;
    for (const auto finder : {&Diagnosis::find_other_call, &Diagnosis::find_other_graph,
                              &Diagnosis::find_absent, &Diagnosis::find_unfinished}) {
      for (const auto& [id, members] : groups_) {
        auto verdict = (this->*finder)(members);
        if (!verdict) {
          continue;
        }
        verdict->group = id;
        if (verdict->kind != VerdictKind::NothingCertain) {
          return verdict;
        }
        if (!uncertain) {
          uncertain = std::move(verdict);
        }
      }
    }
    return uncertain;
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
    const auto silent = ranks_where(
        [&](const auto& rank) { return !rank.report && rank.silence > limits_.min_silence; });
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
      const auto& pending = *waiting.pending;
      for (const auto& other : members) {
        const auto end = other.calls.upper_bound(pending.number);
        for (auto theirs = other.calls.lower_bound(pending.first); theirs != end; ++theirs) {
          const auto number = theirs->first;
          const auto* mine = number == pending.number ? &pending : waiting.find_call(number);
          if (other.is_counted && mine != nullptr && !theirs->second.fits(*mine)) {
            return differing_calls(members, {waiting, *mine}, {other, theirs->second});
          }
        }
      }
      if (auto earlier = find_other_earlier_call(members, waiting)) {
        return earlier;
      }
    }
    return std::nullopt;
  }

  // Calls that differ only in their purpose end, with wrong numbers, and shift all that follow.
  std::optional<Verdict> find_other_earlier_call(const GroupMembers& members,
                                                 const GroupMember& waiting) const {
    for (const auto& [number, mine] : waiting.calls) {
      for (const auto& other : members) {
        const auto* theirs = other.is_counted ? other.find_call(number) : nullptr;
        if (theirs != nullptr && !theirs->fits(mine)) {
          return differing_calls(members, {waiting, mine}, {other, *theirs});
        }
      }
    }
    return std::nullopt;
  }

  struct CallOfRank {
    const GroupMember& member;
    const ReportedCall& call;
  };

  Verdict differing_calls(const GroupMembers& members, const CallOfRank& waiting,
                          const CallOfRank& other) const {
    const auto& mine = waiting.call;
    const auto& theirs = other.call;
    auto kind = VerdictKind::OtherOperation;
    const char* what = "call different operations";
    if (other.member.calls_elsewhere(mine, mine.number) &&
        waiting.member.calls_elsewhere(theirs, theirs.number)) {
      kind = VerdictKind::OtherOrder;
      what = "call collectives in different orders";
    } else if (name_of(theirs.operation) == name_of(mine.operation)) {
      const bool is_one_purpose = mine.label == theirs.label;
      kind = is_one_purpose ? VerdictKind::OtherSize : VerdictKind::OtherOperation;
      what = is_one_purpose ? "call one operation with different sizes, dtypes or roots"
                            : "call one operation for different purposes";
    }
    const auto first = waiting.member.rank;
    const auto second = other.member.rank;
    return {.kind = kind,
            .ranks = minority_of(members, mine.number),
            .text = concat(name(first), " and ", name(second), " ", what, ": rank ", first, " ",
                           mine.words(), ", rank ", second, " ", theirs.words(),
                           mine.has_ended ? any_waiting_words() : waiting_words(members, mine))};
  }

  // Where ranks replay graphs, they wait in different calls, and neither can have passed the other.
  std::optional<Verdict> find_other_graph(const GroupMembers& members) const {
    for (const auto& waiting : members) {
      if (!waiting.pending || waiting.is_counted) {
        continue;
      }
      const auto& call = *waiting.pending;
      for (const auto& other : members) {
        if (other.pending && !other.pending->fits(call) && !other.may_have_passed(waiting) &&
            !waiting.may_have_passed(other)) {
          return Verdict{.kind = VerdictKind::OtherGraph,
                         .ranks = {waiting.rank, other.rank},
                         .text = concat(name(waiting.rank), " and ", name(other.rank),
                                        " run different steps: rank ", waiting.rank, " waits in ",
                                        call.words(), ", rank ", other.rank, " in ",
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
    auto missed = call.number;  // the first that one of them did not enter
    for (const auto& member : members) {
      if (member.entered(*waiting) == Entered::No) {
        absent.push_back(member.rank);
        missed = call.replay ? missed : std::clamp(member.num_called + 1, call.first, missed);
      }
    }
    if (absent.empty()) {
      return std::nullopt;
    }
    const auto* found = missed == call.number ? nullptr : waiting->find_call(missed);
    const auto& missed_call = found == nullptr ? call : *found;
    const auto [kind, place] = place_of(absent.front());
    return Verdict{.kind = kind,
                   .ranks = absent,
                   .text = concat(names(absent), " did not enter ", missed_call.words(), "; ",
                                  place, waiting_words(members, missed_call))};
  }

  // Where a rank is that others wait for: "it waits in the loader for batch 406 of epoch 0".
  std::pair<VerdictKind, std::string> place_of(int rank) const {
    const auto& evidence = at(rank);
    const auto& [step, where, plane_call, one_thread, groups] = evidence.report->position;
    if (const auto found = where.find(kFrozenActivity); found != std::string::npos) {
      return {VerdictKind::Frozen,
              concat("it changed ", kFrozenActivity, where.substr(found + kFrozenActivity.size()),
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
    if (const auto found = where.find(kLoaderWait); found != std::string::npos) {
      return {VerdictKind::Absent, concat("it waits", step_words(step), " in the loader for ",
                                          where.substr(found + kLoaderWait.size()))};
    }
    const auto load = evidence.report->cpu_percent;
    return {load >= kComputesPercent ? VerdictKind::Computes : VerdictKind::Absent,
            concat("it ", load >= kComputesPercent ? "computes" : "is", place_words(step, where),
                   " (", load, " % of a core)")};
  }

  // No rank of the communicator is known to be absent.
  std::optional<Verdict> find_unfinished(const GroupMembers& members) const {
    const auto* waiting = find_earliest(members);
    if (waiting == nullptr) {
      return std::nullopt;
    }
    const auto& call = *waiting->pending;
    std::vector<int> ended, pending, unknown;
    for (const auto& member : members) {
      if (member.has_ended(*waiting)) {
        ended.push_back(member.rank);
      } else if (member.waits_in(call)) {
        pending.push_back(member.rank);
      } else if (member.entered(*waiting) == Entered::Unknown) {
        unknown.push_back(member.rank);
      }
    }
    if (!ended.empty() && call.waited_ms < kLinkWaitMs) {
      return Verdict{.text = concat(rank_words(ended), " ended ", call.words(), ", and ",
                                    names(pending), " not yet", waiting_words(members, call))};
    }
    if (!ended.empty()) {
      return Verdict{
          .kind = VerdictKind::DeadLink,
          .ranks = pending,
          .text = concat(rank_words(ended), " ended ", call.words(), ", and ", names(pending),
                         " did not: data between them does not arrive, or its device hangs",
                         waiting_words(members, call))};
    }
    if (!unknown.empty()) {
      return Verdict{
          .text = concat("ranks that replay different steps cannot be compared: ", names(unknown),
                         " may have entered ", call.words(), " or not; ",
                         place_of(unknown.front()).second, waiting_words(members, call))};
    }
    const bool has_all = ranks_where([](const auto& rank) { return !rank.report; }).empty();
    return Verdict{.text = concat(has_all ? "all ranks" : "all ranks that answered", " entered ",
                                  call.words(),
                                  ", and none is known to have ended it: a kernel before it still "
                                  "runs, or a link between them is down",
                                  waiting_words(members, call))};
  }

  // No rank waits in a collective of a communicator.
  Verdict find_plane_wait() const {
    const auto calls = [](const auto& rank) {
      return rank.report && rank.report->position.plane_call != 0 && rank.call;
    };
    const auto waiting = ranks_where(
        [&](const auto& rank) { return calls(rank) && rank.waited >= limits_.min_wait; });
    if (waiting.empty()) {
      const auto& position = at(0).report->position;
      return {.text = concat("no rank waits for another one; ", name(0), " is",
                             place_words(position.step, position.where))};
    }
    const auto& first = at(waiting.front());
    const auto waiting_words = concat(rank_words(waiting), waiting.size() == 1 ? " waits" : " wait",
                                      " since ", seconds_words(first.waited.count()));
    const auto busy = ranks_where([&](const auto& rank) {
      return rank.report && !calls(rank) && rank.num_calls <= first.call->sequence;
    });
    if (busy.empty()) {
      return {.text = concat(waiting_words, " in the control plane's ", first.call->name,
                             ", which all ranks that answered have entered")};
    }
    const auto [kind, place] = place_of(busy.front());
    return {.kind = kind,
            .ranks = busy,
            .text = concat(names(busy), " did not enter the control plane's ", first.call->name,
                           "; ", place, "; ", waiting_words)};
  }

  const std::vector<RankEvidence>& evidence_;
  const DiagnosisLimits limits_;
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

Verdict diagnose(const std::vector<RankEvidence>& evidence, const DiagnosisLimits& limits) {
  std::vector<RankSnapshot> snapshots;
  for (const auto& rank : evidence) {
    std::optional<RankPosition> position;
    if (rank.report && rank.report->position.waits()) {
      position = rank.report->position;
    }
    snapshots.push_back({rank.host, rank.call, rank.num_calls, std::move(position)});
  }
  auto verdict = Diagnosis(evidence, limits).find();
  verdict.is_certain = proves(prove_deadlock(snapshots), verdict);
  return verdict;
}

}  // namespace ddp::detail
