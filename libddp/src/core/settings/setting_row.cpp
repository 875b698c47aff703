// SPDX-License-Identifier: Apache-2.0
#include "core/settings/setting_row.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/log/lower_case.hpp"

namespace ddp {
namespace detail {
namespace {

constexpr std::size_t kMaxLength = 128;  // bounds the quadratic work; keys are shorter
constexpr std::size_t kMaxEdits = 2;

// Optimal string alignment: insertions, deletions, changes and neighbour swaps cost one each.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> before(b.size() + 1), last(b.size() + 1), now(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) {
    last[j] = j;
  }
  for (std::size_t i = 1; i <= a.size(); ++i) {
    now[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      now[j] = std::min({last[j] + 1, now[j - 1] + 1, change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        now[j] = std::min(now[j], before[j - 2] + 1);
      }
    }
    std::swap(before, last);
    std::swap(last, now);
  }
  return last[b.size()];
}

class RowLister final : public SectionVisitor<RowLister> {
 public:
  RowLister(const std::string& section, SettingRows& rows) : SectionVisitor(section), rows_(rows) {}

  template <typename T>
  void visit(const Field& field, const T& value) {
    rows_.push_back(make_row(field, value));
  }

 private:
  SettingRows& rows_;
};

// Prints 10000000 instead of 1e+07, which is easier to read as an integer limit.
std::string limit_text(double value) {
  constexpr double kPlain = 1e15;
  return value == std::floor(value) && std::abs(value) < kPlain
             ? std::to_string(static_cast<int64_t>(value))
             : value_text(value);
}

std::string allowed_range(const Field& field, const std::string& what) {
  const bool low = !std::isinf(field.min);
  const bool high = !std::isinf(field.max);
  if (low && high) {
    return concat(what, " from ", limit_text(field.min), " to ", limit_text(field.max));
  }
  if (low) {
    return concat(what, " >= ", limit_text(field.min));
  }
  return high ? concat(what, " <= ", limit_text(field.max)) : what;
}

}  // namespace

void list_settings(const std::string& section, const std::function<void(FieldVisitor&)>& describe,
                   SettingRows& rows) {
  RowLister lister(section, rows);
  describe(lister);
}

std::string value_text(double value) {
  if (std::isinf(value)) {
    return value > 0 ? "inf" : "-inf";
  }
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, end);
}

std::string join(const std::vector<std::string>& items, const char* separator) {
  std::string text;
  for (const std::string& item : items) {
    text += (text.empty() ? "" : separator) + item;
  }
  return text;
}

std::string nearest(const std::string& word, const std::vector<std::string>& candidates) {
  std::string best;
  std::size_t best_distance = kMaxEdits + 1;
  if (word.size() > kMaxLength) {
    return best;
  }
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(lower_case(word), lower_case(candidate));
    if (distance < best_distance && 2 * distance < word.size()) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

bool is_removed_setting(const std::string& key) {
  return key == "optimizer.overlap_backward" || key == "optimizer.skip_dead_taps" ||
         key == "context.communicator.nccl_algorithm";
}

}  // namespace detail

std::string SettingRow::text() const {
  return is_list() ? concat("[", detail::join(values, ", "), "]") : values.front();
}

std::string SettingRow::allowed() const {
  const std::string choices = detail::join(field.choices, ", ");
  // The limits of int are of no use to a reader.
  Field shown = field;
  if (shown.max >= std::numeric_limits<int>::max()) {
    shown.max = std::numeric_limits<double>::infinity();
  }
  if (shown.min <= std::numeric_limits<int>::min()) {
    shown.min = -std::numeric_limits<double>::infinity();
  }
  switch (type) {
    case Type::Bool:
      return "true or false";
    case Type::Integer:
      return detail::allowed_range(shown, "integer");
    case Type::Number:
      return detail::allowed_range(shown, "number") +
             (choices.empty() ? "" : concat(", or ", choices));
    case Type::Text:
      return choices.empty() ? "string" : concat("one of ", choices);
    case Type::IntegerList:
      return concat("list, each ", detail::allowed_range(shown, "integer"));
    case Type::NumberList:
      return concat("list, each ", detail::allowed_range(shown, "number"));
    case Type::TextList:
      return choices.empty() ? "list of strings" : concat("list of ", choices);
  }
  return {};
}

}  // namespace ddp
