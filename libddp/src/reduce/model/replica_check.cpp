// SPDX-License-Identifier: Apache-2.0
#include "reduce/model/replica_check.hpp"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <unordered_set>
#include <utility>

#include "comm/string_collectives.hpp"
#include "core/control/hub/peer_table.hpp"
#include "core/settings/setting_row.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ops/shared/tensor_hash.hpp"
#include "reduce/model/replica_sync.hpp"

namespace ddp::detail {
namespace {

thread_local int num_holds = 0;

constexpr const char* kFix =
    "; fix: change this tensor on all ranks alike; if the program did not change it, the memory or "
    "the GPU of a rank is faulty (docs/wrong_bits.md)";

// "rank 2 (node1)" or "ranks 0, 1". A group of split() has ranks of its own, and no hosts.
std::string text_of(const std::vector<int>& ranks, const Membership& membership) {
  const auto& hosts = membership.hosts;
  if (ranks.size() > 1) {
    return concat("ranks ", list_ranks(ranks), hosts.empty() ? " of their group" : "");
  }
  const int rank = ranks.front();
  return concat("rank ", rank,
                hosts.empty() ? " of its group" : " (" + hosts.at(static_cast<size_t>(rank)) + ")");
}

// How often each line occurs.
std::map<std::string, int> count_lines(const std::string& text) {
  std::map<std::string, int> counts;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    ++counts[line];
  }
  return counts;
}

std::string names_of(const NamedParameters& tensors) {
  std::string names;
  for (const auto& [name, tensor] : tensors) {
    names += name + '\n';
  }
  return names;
}

// One row for each rank.
std::vector<std::vector<int64_t>> rows_of(const at::Tensor& numbers, int world_size) {
  const int64_t columns = numbers.numel() / world_size;
  std::vector<std::vector<int64_t>> rows;
  for (int rank = 0; rank < world_size; ++rank) {
    const auto* begin = numbers.const_data_ptr<int64_t>() + rank * columns;
    rows.emplace_back(begin, begin + columns);
  }
  return rows;
}

// [ranks * numbers] on the CPU. Collective.
at::Tensor gather(Communicator& communicator, const at::Tensor& numbers) {
  const auto all = at::empty({communicator.world_size() * numbers.numel()}, numbers.options());
  communicator.all_gather(all, numbers)->wait();
  return all.cpu();
}

}  // namespace

bool ReplicaDifference::has_majority(int world_size) const {
  return 2 * std::ssize(groups.front()) > world_size;
}

std::vector<ReplicaDifference> find_differences(const std::vector<std::vector<int64_t>>& hashes) {
  std::vector<ReplicaDifference> all;
  for (size_t tensor = 0; tensor < hashes.front().size(); ++tensor) {
    std::map<int64_t, std::vector<int>> by_hash;
    for (size_t rank = 0; rank < hashes.size(); ++rank) {
      by_hash[hashes[rank][tensor]].push_back(static_cast<int>(rank));
    }
    if (by_hash.size() == 1) {
      continue;
    }
    auto& difference = all.emplace_back();
    difference.tensor = tensor;
    for (auto& [hash, ranks] : by_hash) {
      difference.groups.push_back(std::move(ranks));
    }
    std::sort(difference.groups.begin(), difference.groups.end(), [](const auto& a, const auto& b) {
      return a.size() != b.size() ? a.size() > b.size() : a < b;
    });
  }
  return all;
}

std::string describe_difference(const std::string& what, const ReplicaDifference& difference,
                                const Membership& membership) {
  const auto& groups = difference.groups;
  if (difference.has_majority(membership.world_size)) {
    std::vector<int> others;
    for (size_t i = 1; i < groups.size(); ++i) {
      others.insert(others.end(), groups[i].begin(), groups[i].end());
    }
    std::sort(others.begin(), others.end());
    return concat(what, " differs on ", text_of(others, membership), " from the other ",
                  groups.front().size(), " ranks");
  }
  std::string text = concat(what, " differs between ", text_of(groups[0], membership));
  for (size_t i = 1; i < groups.size(); ++i) {
    text += concat(i + 1 < groups.size() ? ", " : " and ", text_of(groups[i], membership));
  }
  return text;
}

ReplicaCheck::ReplicaCheck(NamedParameters weights, CommunicatorPtr communicator,
                           const DdpOptions& options, std::string of_model)
    : weights_(std::move(weights)),
      communicator_(std::move(communicator)),
      options_(options),
      of_model_(std::move(of_model)) {
  if (options.desync_check_every < 0) {
    throw SettingsError(concat("ddp.desync_check_every=", options.desync_check_every,
                               " must be 0 or more; fix: 0 switches the check off"));
  }
  if (options.desync_policy == DesyncPolicy::Repair && communicator_->world_size() == 2) {
    throw SettingsError(
        "ddp.desync_policy=repair needs at least 3 ranks: of 2 ranks that differ neither is known "
        "to be right; fix: set ddp.desync_policy=error or warn");
  }
}

std::shared_ptr<const ReplicaCheck::Source> ReplicaCheck::add_source(Source source) {
  auto shared = std::make_shared<const Source>(std::move(source));
  std::erase_if(sources_, [](const auto& weak) { return weak.expired(); });
  sources_.push_back(shared);
  return shared;
}

// The names are those of messages.
NamedParameters ReplicaCheck::weights_and_state(const States& states) const {
  NamedParameters all;
  std::unordered_set<const void*> own;
  for (const auto& [name, tensor] : weights_) {
    all.push_back({"parameter " + name, tensor.detach()});
    own.insert(tensor.unsafeGetTensorImpl());
  }
  for (const auto& [state, parameters] : states()) {
    std::set<std::string> others;
    for (const auto& [name, tensor] : parameters) {
      if (!own.contains(tensor.unsafeGetTensorImpl())) {
        others.insert(name);
      }
    }
    for (const auto& [key, tensor] : state.tensors) {
      if (!others.contains(key.parameter)) {
        all.push_back(
            {key.slot.empty() ? key.parameter : key.slot + " of " + key.parameter, tensor});
      }
    }
  }
  return all;
}

NamedParameters ReplicaCheck::tensors(const States& states) const {
  auto all = weights_and_state(states);
  for (const auto& weak : sources_) {
    if (const auto source = weak.lock()) {
      const auto more = (*source)();
      all.insert(all.end(), more.begin(), more.end());
    }
  }
  return all;
}

at::Tensor ReplicaCheck::hash(const NamedParameters& tensors) const {
  std::vector<at::Tensor> only;
  for (const auto& [name, tensor] : tensors) {
    only.push_back(tensor);
  }
  return ops::hash_tensors(only, communicator_->device());
}

bool ReplicaCheck::are_equal(const at::Tensor& hashes) const {
  const auto all = gather(*communicator_, ops::hash_tensors({hashes}, communicator_->device()));
  return all.eq(all[0]).all().item<bool>();
}

// Throws if ranks keep different state, or warns once. Sources may differ.
void ReplicaCheck::check_names(const NamedParameters& compared) {
  const auto all = all_gather_string(*communicator_, names_of(compared));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const auto lines = first_different_lines(all[0], all[rank]);
    if (!lines) {
      continue;
    }
    const auto message = concat(
        "the ranks", of_model_, " keep different optimizer state: rank 0 has \"", lines->first,
        "\", rank ", rank, " has \"", lines->second,
        "\"; fix: make the same optimizers on every rank, and give the same parameters a gradient");
    if (options_.desync_policy != DesyncPolicy::Warn) {
      throw MismatchError(message);
    }
    if (!std::exchange(has_warned_of_names_, true) && communicator_->rank() == 0) {
      log_warning(message + " (compared are the tensors that all ranks have)");
    }
    return;
  }
}

// In rank 0's order. Several tensors may have one name (two optimizers, two averages).
void ReplicaCheck::keep_common(NamedParameters& tensors) const {
  const auto texts = all_gather_string(*communicator_, names_of(tensors));
  if (std::all_of(texts.begin(), texts.end(), [&](const auto& text) { return text == texts[0]; })) {
    return;
  }
  auto counts = count_lines(texts[0]);
  for (const std::string& text : texts) {
    auto others = count_lines(text);
    for (auto& [name, count] : counts) {
      count = std::min(count, others[name]);
    }
  }
  std::multimap<std::string, at::Tensor> own;
  for (const auto& [name, tensor] : tensors) {
    own.emplace(name, tensor);
  }
  tensors.clear();
  std::istringstream lines(texts[0]);
  for (std::string name; std::getline(lines, name);) {
    if (counts[name]-- > 0) {
      const auto first = own.lower_bound(name);
      tensors.push_back({name, first->second});
      own.erase(first);
    }
  }
}

// Returns whether the ranks are equal now. A count that an optimizer keeps on the host (LibTorch's
// optimizers) is given as a copy and stays different.
bool ReplicaCheck::repair(const NamedParameters& compared, const States& states,
                          const std::vector<ReplicaDifference>& all) const {
  for (const auto& difference : all) {
    const at::Tensor& tensor = compared[difference.tensor].tensor;
    const at::Tensor sent = tensor.to(communicator_->device());
    broadcast_coalesced(*communicator_, {sent}, difference.groups.front().front());
    if (!sent.is_same(tensor)) {
      tensor.copy_(sent);
    }
  }
  auto now = tensors(states);
  keep_common(now);
  return are_equal(hash(now));
}

void ReplicaCheck::run(const States& states, int64_t num_steps) {
  const at::NoGradGuard no_grad;
  auto all = tensors(states);
  const auto hashes = hash(all);
  if (are_equal(hashes)) {
    last_equal_step_ = num_steps;
    return;
  }
  check_names(weights_and_state(states));
  keep_common(all);
  const auto differences =
      find_differences(rows_of(gather(*communicator_, hash(all)), communicator_->world_size()));
  if (!differences.empty()) {
    const auto& first = differences.front();
    const auto num_more = differences.size() - 1;
    const auto message =
        concat("the replicas", of_model_, " differ in step ", num_steps, " of the optimizer",
               last_equal_step_ > 0 ? concat(" (equal in step ", last_equal_step_, ")") : "", ": ",
               describe_difference(all[first.tensor].name, first, communicator_->membership()),
               num_more > 0 ? concat(" (", num_more, " more tensors differ)") : "");
    if (!resolve(all, states, differences, message)) {
      return;
    }
  }
  last_equal_step_ = num_steps;
}

// Returns whether the ranks are equal now.
bool ReplicaCheck::resolve(const NamedParameters& compared, const States& states,
                           const std::vector<ReplicaDifference>& all,
                           const std::string& message) const {
  const bool repairs = options_.desync_policy == DesyncPolicy::Repair;
  const bool have_majorities = std::all_of(all.begin(), all.end(), [this](const auto& difference) {
    return difference.has_majority(communicator_->world_size());
  });
  const bool is_repaired = repairs && have_majorities && repair(compared, states, all);
  if (options_.desync_policy == DesyncPolicy::Error || (repairs && !is_repaired)) {
    const char* why = !repairs          ? ""
                      : have_majorities ? "; it could not be repaired"
                                        : "; it cannot be repaired, because no value is that of "
                                          "more than half of the ranks";
    throw MismatchError(concat(message, why, kFix));
  }
  if (communicator_->rank() == 0) {
    log_warning(message + (is_repaired ? "; repaired from the majority" : kFix));
  }
  return is_repaired;
}

ReplicaCheck::Hold::Hold() {
  ++num_holds;
}
ReplicaCheck::Hold::~Hold() {
  --num_holds;
}
bool ReplicaCheck::is_held() {
  return num_holds > 0;
}

std::shared_ptr<ReplicaCheck> make_replica_check(NamedParameters weights,
                                                 CommunicatorPtr communicator,
                                                 const DdpOptions& options, std::string of_model) {
  const bool is_off = options.desync_check_every == 0 || communicator->world_size() == 1;
  return is_off ? nullptr
                : std::make_shared<ReplicaCheck>(std::move(weights), std::move(communicator),
                                                 options, std::move(of_model));
}

}  // namespace ddp::detail
