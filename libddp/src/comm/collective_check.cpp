// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_check.hpp"

#include <charconv>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/collective_label.hpp"
#include "core/control/running_clock.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/files.hpp"

namespace ddp::detail {

/// Calls that wait for other ranks' calls.
class CollectiveCheck::Calls {
 public:
  /// A waiting call.
  class Waiting {
   public:
    Waiting(Calls& calls, const std::string& call) : number(calls.begin(call)), calls_(calls) {}
    ~Waiting() { calls_.end(number); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

    const int64_t number;

   private:
    Calls& calls_;
  };

  explicit Calls(std::string id) : id_(std::move(id)) {}

  GroupPosition position() const {
    const std::lock_guard lock(mutex_);
    GroupPosition position{.id = id_,
                           .num_called = static_cast<uint64_t>(num_called_),
                           .is_check = true,
                           .caller = caller_};
    if (!waiting_.empty()) {
      position.pending = static_cast<uint64_t>(waiting_.begin()->first);
      position.operation = waiting_.begin()->second.call;
      position.label = waiting_.begin()->second.label;
      position.waited = static_cast<uint64_t>(waiting_.rbegin()->first);
    }
    return position;
  }

 private:
  struct LabeledCall {
    std::string call, label;
  };

  int64_t begin(const std::string& call) {
    const std::lock_guard lock(mutex_);
    add_caller(caller_);
    waiting_.emplace(++num_called_, LabeledCall{call, LabelScope::current_text()});
    return num_called_;
  }
  void end(int64_t number) {
    const std::lock_guard lock(mutex_);
    waiting_.erase(number);
  }

  const std::string id_;
  mutable std::mutex mutex_;
  int64_t num_called_ = 0;
  CallerThread caller_ = std::thread::id();
  std::map<int64_t, LabeledCall> waiting_;  // by number
};

namespace {

constexpr size_t kMaxLabelBytes = 200;  // of the GroupExchange::kMaxExchangeBytes

// "all_to_all (Float, uneven)\n2 4:5 0:3 ": the rank, then sent:expected of each other rank. Pairs
// that do not fit are left out.
std::string with_sizes(const std::string& call, const std::optional<ExchangeSizes>& sizes) {
  if (!sizes) {
    return call;
  }
  auto text = concat(call, "\n", sizes->rank, " ");
  for (size_t i = 0; i < sizes->sent.size(); ++i) {
    const auto pair = concat(sizes->sent[i], ":", sizes->expected[i], " ");
    if (text.size() + pair.size() > GroupExchange::kMaxExchangeBytes) {
      break;
    }
    text += pair;
  }
  return text;
}

std::string without_sizes(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

ExchangeSizes read_sizes(const std::string& text) {
  ExchangeSizes sizes;
  const char* at = text.data() + text.find('\n') + 1;
  const char* const end = text.data() + text.size();
  at = std::from_chars(at, end, sizes.rank).ptr + 1;
  while (at < end) {
    at = std::from_chars(at, end, sizes.sent.emplace_back()).ptr + 1;
    at = std::from_chars(at, end, sizes.expected.emplace_back()).ptr + 1;
  }
  return sizes;
}

// Describes the first pair of ranks whose sizes differ; "" if all fit. `texts`: by rank of the job.
std::string find_different_sizes(const std::map<int, std::string>& texts) {
  std::vector<std::pair<int, ExchangeSizes>> ranks;
  for (const auto& [rank, text] : texts) {
    ranks.emplace_back(rank, read_sizes(text));
  }
  for (const auto& [from, of_sender] : ranks) {
    for (const auto& [to, of_receiver] : ranks) {
      const auto sender = static_cast<size_t>(of_sender.rank);
      const auto receiver = static_cast<size_t>(of_receiver.rank);
      if (receiver < of_sender.sent.size() && sender < of_receiver.expected.size() &&
          of_sender.sent[receiver] != of_receiver.expected[sender]) {
        return concat("rank ", from, " sends ", of_sender.sent[receiver], " elements to rank ", to,
                      ", which expects ", of_receiver.expected[sender]);
      }
    }
  }
  return "";
}

}  // namespace

std::string describe_call(const char* operation, const at::Tensor& tensor,
                          std::optional<ReduceOp> op, std::optional<int> root) {
  if (!tensor.defined()) {
    return operation;
  }
  return concat(operation, " (", op ? concat(to_string(*op), " of ") : "", tensor.numel(), " ",
                c10::toString(tensor.scalar_type()), root ? concat(", root ", *root) : "", ")");
}

std::shared_ptr<CollectiveCheck> CollectiveCheck::create(
    const std::shared_ptr<ControlPlane>& control_plane, bool wanted, const AddProbe& add_probe) {
  if (control_plane->world_size() == 1) {
    return nullptr;
  }
  control_plane->require_equal("context.communicator.check_collectives", wanted ? "true" : "false");
  auto* const exchange = control_plane->group_exchange();
  if (!wanted || exchange == nullptr) {
    return nullptr;
  }
  return std::make_shared<CollectiveCheck>(std::shared_ptr<GroupExchange>(control_plane, exchange),
                                           control_plane->world_size(), "the world", add_probe);
}

CollectiveCheck::CollectiveCheck(std::weak_ptr<GroupExchange> exchange, int num_ranks,
                                 std::string group, AddProbe add_probe)
    : exchange_(std::move(exchange)),
      num_ranks_(num_ranks),
      group_(std::move(group)),
      add_probe_(std::move(add_probe)),
      calls_(std::make_unique<Calls>("check of " + group_)),
      position_source_(
          std::make_shared<PositionSource>([calls = calls_.get()] { return calls->position(); })) {
  if (add_probe_) {
    add_probe_(probe_of(position_source_));
  }
}

CollectiveCheck::~CollectiveCheck() {
  position_source_->close();
}

int64_t CollectiveCheck::compare(const std::string& call, std::chrono::milliseconds limit,
                                 const std::function<void()>& poll,
                                 const std::optional<ExchangeSizes>& sizes) {
  const Calls::Waiting waiting(*calls_, call);
  const auto number = waiting.number;
  const auto label = LabelScope::current_text();
  const auto labeled = with_label(call, label.substr(0, kMaxLabelBytes));
  const auto exchange = exchange_.lock();
  if (exchange == nullptr || num_ranks_ == 1) {
    return number;  // the context was closed, which the call itself will report
  }
  RunningLimit running_limit(limit);
  const auto check_limit = [&] {
    poll();
    if (running_limit.is_over()) {
      throw PeerLostError(concat("collective #", number, " of ", group_, ": this rank called ",
                                 labeled, ", and not all of the ", num_ranks_,
                                 " ranks called a collective within ", limit.count(), " ms"));
    }
  };
  const auto calls = exchange->exchange(xxh3(concat(group_, " #", number)), num_ranks_,
                                        with_sizes(labeled, sizes), check_limit);
  const int first_rank = calls.begin()->first;
  const auto first_call = without_sizes(calls.begin()->second);
  for (const auto& [rank, text] : calls) {
    if (const auto other_call = without_sizes(text); other_call != first_call) {
      throw MismatchError(concat("collective #", number, " of ", group_, " differs: rank ",
                                 first_rank, " called ", first_call, ", rank ", rank, " called ",
                                 other_call,
                                 "; fix: call the same operations in the same order on all "
                                 "ranks of a group, with tensors of equal size and dtype"));
    }
  }
  if (const auto difference = sizes ? find_different_sizes(calls) : ""; !difference.empty()) {
    throw MismatchError(concat("collective #", number, " of ", group_, ", ", labeled, ": ",
                               difference,
                               "; fix: each rank's sizes must fit those of the others"));
  }
  return number;
}

std::shared_ptr<CollectiveCheck> CollectiveCheck::of_group(int64_t split, int color,
                                                           int num_ranks) const {
  return std::make_shared<CollectiveCheck>(
      exchange_, num_ranks, concat(group_, ", split #", split, ", color ", color), add_probe_);
}

}  // namespace ddp::detail
