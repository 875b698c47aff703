// SPDX-License-Identifier: Apache-2.0
#include "core/launch/slurm_hostlist.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

constexpr std::size_t kMaxText = 64 * 1024;
constexpr int64_t kMaxCount = int64_t{1} << 31;

[[noreturn]] void fail(const std::string& variable, std::string_view text, const std::string& why) {
  constexpr std::size_t kShown = 80;
  const std::string shown(text.substr(0, kShown));
  throw SettingsError(concat(variable, "='", shown, text.size() > kShown ? "…" : "",
                             "' cannot be read: ", why,
                             "; Slurm sets this variable, do not change it"));
}

// "01-03": numbers padded to the width of the first one.
struct Range {
  int64_t first = 0;
  int64_t last = 0;
  std::size_t width = 0;
  int64_t size() const { return last - first + 1; }
};

// One host pattern: repeated prefix[ranges], then a suffix. `ranges` and `prefixes` have equal
// size.
struct Pattern {
  std::vector<std::string> prefixes;
  std::vector<std::vector<Range>> ranges;
  std::string suffix;
  int64_t size = 1;
};

class HostlistReader {
 public:
  HostlistReader(std::string_view text, const std::string& variable)
      : text_(text), variable_(variable) {
    if (text.size() > kMaxText) {
      fail(variable, text, "it is longer than 64 KiB");
    }
  }

  std::optional<Pattern> next() {
    if (position_ == text_.size()) {
      if (position_ == 0 || text_.back() == ',') {
        fail(variable_, text_, "a host name is empty");
      }
      return std::nullopt;
    }
    Pattern pattern;
    std::string plain;
    while (position_ < text_.size() && text_[position_] != ',') {
      const char c = text_[position_++];
      if (c == ']') {
        fail(variable_, text_, "']' without '['");
      } else if (c == '[') {
        pattern.prefixes.push_back(std::move(plain));
        plain.clear();
        pattern.ranges.push_back(read_brackets(pattern.size));
      } else {
        plain.push_back(c);
      }
    }
    pattern.suffix = std::move(plain);
    if (pattern.suffix.empty() && pattern.ranges.empty()) {
      fail(variable_, text_, "a host name is empty");
    }
    position_ += position_ < text_.size() ? 1 : 0;
    return pattern;
  }

 private:
  std::vector<Range> read_brackets(int64_t& product) {
    const std::size_t close = text_.find(']', position_);
    if (close == std::string_view::npos) {
      fail(variable_, text_, "'[' is not closed");
    }
    std::string_view inside = text_.substr(position_, close - position_);
    position_ = close + 1;
    std::vector<Range> ranges;
    int64_t total = 0;
    for (bool more = true; more;) {
      const std::size_t comma = inside.find(',');
      more = comma != std::string_view::npos;
      ranges.push_back(read_range(inside.substr(0, comma)));
      total += ranges.back().size();
      inside = more ? inside.substr(comma + 1) : std::string_view();
    }
    // Both factors are at most 2^31, so the product cannot overflow before this check.
    if (total > kMaxCount || product * total > kMaxCount) {
      fail(variable_, text_, "it names more than 2^31 hosts");
    }
    product *= total;
    return ranges;
  }

  Range read_range(std::string_view text) const {
    const std::size_t dash = text.find('-');
    const std::string_view low = text.substr(0, dash);
    const std::string_view high = dash == std::string_view::npos ? low : text.substr(dash + 1);
    const auto first = parse_number<uint32_t>(low);
    const auto last = parse_number<uint32_t>(high);
    if (!first || !last) {
      fail(variable_, text_, concat("'", text, "' is no number or range"));
    }
    if (*last < *first) {
      fail(variable_, text_, concat("the range '", text, "' runs backwards"));
    }
    return {*first, *last, low.size()};
  }

  std::string_view text_;
  const std::string& variable_;
  std::size_t position_ = 0;
};

std::string numbered(const std::vector<Range>& ranges, int64_t index) {
  for (const Range& range : ranges) {
    if (index < range.size()) {
      std::string digits = std::to_string(range.first + index);
      return std::string(range.width - std::min(range.width, digits.size()), '0') + digits;
    }
    index -= range.size();
  }
  return {};
}

// The last brackets vary fastest, as in Slurm.
std::string host_name(const Pattern& pattern, int64_t index) {
  std::string name = pattern.suffix;
  for (std::size_t i = pattern.ranges.size(); i-- > 0;) {
    int64_t size = 0;
    for (const Range& range : pattern.ranges[i]) {
      size += range.size();
    }
    name = pattern.prefixes[i] + numbered(pattern.ranges[i], index % size) + name;
    index /= size;
  }
  return name;
}

}  // namespace

int64_t count_hosts(std::string_view hostlist, const std::string& variable) {
  HostlistReader reader(hostlist, variable);
  int64_t count = 0;
  while (const auto pattern = reader.next()) {
    count += pattern->size;
    if (count > kMaxCount) {
      fail(variable, hostlist, "it names more than 2^31 hosts");
    }
  }
  return count;
}

std::string host_at(std::string_view hostlist, int64_t index, const std::string& variable) {
  HostlistReader reader(hostlist, variable);
  int64_t left = index;
  while (const auto pattern = reader.next()) {
    if (left < pattern->size) {
      return host_name(*pattern, left);
    }
    left -= pattern->size;
  }
  fail(variable, hostlist, concat("it has no host number ", index));
}

TasksPerNode parse_tasks_per_node(std::string_view text, int64_t node_rank,
                                  const std::string& variable) {
  if (text.size() > kMaxText) {
    fail(variable, text, "it is longer than 64 KiB");
  }
  TasksPerNode result;
  std::string_view rest = text;
  for (bool more = true; more;) {
    const std::size_t comma = rest.find(',');
    more = comma != std::string_view::npos;
    std::string_view item = rest.substr(0, comma);
    rest = more ? rest.substr(comma + 1) : std::string_view();
    uint32_t repeat = 1;
    const std::size_t open = item.find("(x");
    if (open != std::string_view::npos && item.back() == ')') {
      repeat = parse_number<uint32_t>(item.substr(open + 2, item.size() - open - 3)).value_or(0);
      item = item.substr(0, open);
    }
    const auto tasks = parse_number<uint32_t>(item);
    if (!tasks || *tasks == 0 || repeat == 0) {
      fail(variable, text, "expected counts such as 4(x2),3");
    }
    if (node_rank >= result.num_nodes && node_rank < result.num_nodes + repeat) {
      result.on_node = *tasks;
    }
    result.num_nodes += repeat;
    // Checked before the addition: 2^32 * 2^32 would overflow.
    if (int64_t{repeat} > kMaxCount / *tasks || result.num_nodes > kMaxCount) {
      fail(variable, text, "it counts more than 2^31 tasks");
    }
    result.num_tasks += int64_t{repeat} * *tasks;
    if (result.num_tasks > kMaxCount) {
      fail(variable, text, "it counts more than 2^31 tasks");
    }
  }
  return result;
}

}  // namespace ddp::detail
