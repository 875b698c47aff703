// SPDX-License-Identifier: Apache-2.0
#include "export/guards.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <string_view>
#include <utility>

#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"
#include "ddp/export/exported_module.hpp"
#include "export/call_arguments.hpp"
#include "export/stack_functions.hpp"
#include "export/text_scanner.hpp"

namespace ddp::detail {
namespace {

using TermKind = GuardTerm::Kind;

constexpr int kMaxDepth = 100;
constexpr int kMaxTerms = 1000;  // a chain a + b + … makes a tree that is as deep

struct Operation {
  const char* symbol;
  const char* target;
};
// Of two operations that begin alike the longer one is first.
constexpr Operation kSums[] = {{"+", "_operator.add"}, {"-", "_operator.sub"}};
constexpr Operation kProducts[] = {{"*", "_operator.mul"},
                                   {"//", "_operator.floordiv"},
                                   {"/", "_operator.truediv"},
                                   {"%", "_operator.mod"}};
constexpr Operation kComparisons[] = {{"==", "_operator.eq"}, {"!=", "_operator.ne"},
                                      {"<=", "_operator.le"}, {">=", "_operator.ge"},
                                      {"<", "_operator.lt"},  {">", "_operator.gt"}};

// A recursive descent by Python's precedence.
class GuardReader : private TextScanner {
 public:
  GuardReader(std::string_view text, const GuardSources& sources)
      : TextScanner(text), sources_(sources) {}

  GuardTerm read_all() {
    auto term = disjunction();
    skip_blanks();
    if (!rest_.empty()) {
      fail();
    }
    return term;
  }

 private:
  [[noreturn]] static void fail() { throw DataError("the condition is not readable"); }

  template <typename... Terms>
  GuardTerm made(TermKind kind, StackFunction function, Terms... operands) {
    if (++num_terms_ > kMaxTerms) {
      throw DataError("it has too many terms");
    }
    GuardTerm term{.kind = kind, .function = std::move(function)};
    (term.operands.push_back(std::move(operands)), ...);  // a list in braces would copy them
    return term;
  }

  template <typename... Terms>
  GuardTerm call(const std::string& target, Terms... operands) {
    auto function = number_function(target);
    if (!function) {
      throw DataError("unknown function " + printable(target));
    }
    return made(TermKind::Call, std::move(function), std::move(operands)...);
  }

  void expect(std::string_view symbol) {
    if (!take(symbol)) {
      fail();
    }
  }

  static bool is_part_of_word(char character) {
    return std::isalnum(static_cast<unsigned char>(character)) != 0 || character == '_';
  }
  static bool is_part_of_name(char character) {
    return is_part_of_word(character) || character == '.';
  }

  bool take_word(std::string_view word) {
    skip_blanks();
    const bool goes_on = rest_.size() > word.size() && is_part_of_word(rest_[word.size()]);
    return !goes_on && take(word);
  }

  template <std::size_t N>
  const Operation* take_any(const Operation (&operations)[N]) {
    for (const auto& operation : operations) {
      if (take(operation.symbol)) {
        return &operation;
      }
    }
    return nullptr;
  }

  GuardTerm disjunction() {
    if (++depth_ > kMaxDepth) {
      fail();
    }
    auto term = conjunction();
    while (take_word("or")) {
      term = made(TermKind::Or, {}, std::move(term), conjunction());
    }
    --depth_;
    return term;
  }

  GuardTerm conjunction() {
    auto term = negation();
    while (take_word("and")) {
      term = made(TermKind::And, {}, std::move(term), negation());
    }
    return term;
  }

  GuardTerm negation() {
    bool is_negated = false;
    while (take_word("not")) {
      is_negated = !is_negated;
    }
    auto term = comparison();
    return is_negated ? call("torch.sym_not", std::move(term)) : term;
  }

  // a < b < c is a < b and b < c.
  GuardTerm comparison() {
    auto left = sum();
    std::optional<GuardTerm> all;
    while (const auto* operation = take_any(kComparisons)) {
      auto right = sum();
      auto term = call(operation->target, std::move(left), right);
      left = std::move(right);
      all = all ? made(TermKind::And, {}, std::move(*all), std::move(term)) : std::move(term);
    }
    return all ? std::move(*all) : left;
  }

  GuardTerm sum() {
    auto term = product();
    while (const auto* operation = take_any(kSums)) {
      term = call(operation->target, std::move(term), product());
    }
    return term;
  }

  GuardTerm product() {
    auto term = signed_power();
    while (const auto* operation = take_any(kProducts)) {
      term = call(operation->target, std::move(term), signed_power());
    }
    return term;
  }

  GuardTerm signed_power() {
    if (++depth_ > kMaxDepth) {
      fail();
    }
    auto term = take("-") ? call("_operator.neg", signed_power()) : power();
    --depth_;
    return term;
  }

  GuardTerm power() {
    auto term = atom();
    return take("**") ? call("_operator.pow", std::move(term), signed_power()) : term;
  }

  GuardTerm atom() {
    if (take("(")) {
      auto term = disjunction();
      expect(")");
      return term;
    }
    if (take_word("True")) {
      return {.constant = true};
    }
    if (take_word("False")) {
      return {.constant = false};
    }
    if (rest_.starts_with("L[")) {
      return source();
    }
    return !rest_.empty() && std::isdigit(static_cast<unsigned char>(rest_.front())) != 0
               ? number()
               : function_call();
  }

  GuardTerm number() {
    const auto text = take_while(is_part_of_name);
    if (const auto whole = parse_number<int64_t>(text)) {
      return {.constant = *whole};
    }
    if (const auto real = parse_number<double>(text)) {
      return {.constant = *real};
    }
    fail();
  }

  GuardTerm function_call() {
    auto name = std::string(take_while(is_part_of_name));
    static const std::map<std::string, std::string> kNames = {{"max", "torch.sym_max"},
                                                              {"min", "torch.sym_min"},
                                                              {"float", "torch.sym_float"},
                                                              {"int", "torch.sym_int"},
                                                              {"math.sqrt", "torch.sym_sqrt"}};
    if (const auto known = kNames.find(name); known != kNames.end()) {
      name = known->second;
    }
    expect("(");
    std::vector<GuardTerm> operands;
    while (!take(")")) {
      operands.push_back(disjunction());
      if (!take(",") && !rest_.starts_with(')')) {
        fail();
      }
      if (operands.size() == 3 && name.starts_with("torch.sym_m")) {  // max(a, b, c)
        operands[0] = call(name, std::move(operands[0]), std::move(operands[1]));
        operands[1] = std::move(operands[2]);
        operands.pop_back();
      }
    }
    auto term = call(name);
    term.operands = std::move(operands);
    return term;
  }

  std::size_t index() {
    const auto value = parse_number<std::size_t>(
        take_while([](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }));
    expect("]");
    return value ? *value : throw DataError("the condition has an index that is no number");
  }

  // L['x'][0].size()[1]
  GuardTerm source() {
    const auto begin = rest_;
    take("L");
    GuardTerm term{.kind = TermKind::Value};
    std::string path;
    for (bool is_path = true; is_path;) {
      if (take(".size()[") || take(".shape[")) {
        term.kind = TermKind::Size;
        term.dimension = index();
        is_path = false;
      } else if (take(".stride()[")) {
        term.kind = TermKind::Stride;
        term.dimension = index();
        is_path = false;
      } else if (take(".storage_offset()")) {
        term.kind = TermKind::StorageOffset;
        is_path = false;
      } else if (take("['")) {
        const auto key = take_until("']");
        if (!key) {
          fail();
        }
        path += concat("['", *key, "']");
      } else if (take("[")) {
        path += concat('[', index(), ']');
      } else if (take(".")) {
        path += concat("['", take_while(is_part_of_word), "']");
      } else {
        is_path = false;
      }
    }
    const auto found = sources_.find(path);
    if (found == sources_.end()) {
      throw DataError("the condition has an unknown input");
    }
    term.input = found->second;
    term.text = std::string(begin.substr(0, begin.size() - rest_.size()));
    term.text.resize(term.text.find_last_not_of(' ') + 1);
    return term;
  }

  const GuardSources& sources_;
  int depth_ = 0;
  int num_terms_ = 0;
};

c10::IValue of_tensor(const GuardTerm& term, const c10::IValue& input) {
  if (!input.isTensor() || !input.toTensor().defined()) {
    throw DataError(term.text + " is of no tensor");
  }
  const auto& tensor = input.toTensor();
  if (term.kind == TermKind::StorageOffset) {
    return tensor.storage_offset();
  }
  if (term.dimension >= static_cast<std::size_t>(tensor.dim())) {
    throw DataError(concat(term.text, " is of a tensor with ", tensor.dim(), " dimensions"));
  }
  const auto dimension = static_cast<int64_t>(term.dimension);
  return term.kind == TermKind::Size ? tensor.size(dimension) : tensor.stride(dimension);
}

c10::IValue evaluate(const GuardTerm& term, const std::vector<c10::IValue>& inputs) {
  switch (term.kind) {
    case TermKind::Constant:
      return term.constant;
    case TermKind::Value:
      if (!inputs[term.input].isScalar() || inputs[term.input].isComplexDouble()) {
        throw DataError(term.text + " is no number");
      }
      return inputs[term.input];
    case TermKind::Size:
    case TermKind::Stride:
    case TermKind::StorageOffset:
      return of_tensor(term, inputs[term.input]);
    case TermKind::And:
    case TermKind::Or: {
      auto left = evaluate(term.operands[0], inputs);
      const bool decides = is_true(left) == (term.kind == TermKind::Or);
      return decides ? left : evaluate(term.operands[1], inputs);
    }
    case TermKind::Call:
      break;
  }
  ValueStack stack;
  for (const auto& operand : term.operands) {
    stack.push_back(evaluate(operand, inputs));
  }
  term.function(stack, {at::kCPU});
  return stack[0];
}

// "L['x'].size()[0] is 3, L['x'].size()[1] is 4"
void add_values(const GuardTerm& term, const std::vector<c10::IValue>& inputs,
                std::map<std::string, std::string>& values) {
  if (!term.text.empty()) {
    try {
      values[term.text] = concat(evaluate(term, inputs));
    } catch (const DataError&) {
      values[term.text] = "unknown";
    }
  }
  for (const auto& operand : term.operands) {
    add_values(operand, inputs, values);
  }
}

void add_sources(const TreeSpec& spec, const std::string& path, std::vector<std::string>& paths) {
  if (spec.kind == TreeSpec::Kind::Leaf) {
    paths.push_back(path);
  }
  for (std::size_t i = 0; i < spec.children.size(); ++i) {
    add_sources(spec.children[i],
                spec.kind == TreeSpec::Kind::Dict ? concat(path, "['", spec.keys[i], "']")
                                                  : concat(path, '[', i, ']'),
                paths);
  }
}

GuardSources sources_of(const ExportedProgram& program) {
  std::vector<std::string> paths;
  for (const auto& [name, spec] : forward_arguments(program)) {
    add_sources(*spec, concat("['", name, "']"), paths);
  }
  GuardSources sources;
  auto path = paths.begin();
  for (std::size_t i = 0; i < program.inputs.size() && path != paths.end(); ++i) {
    if (program.inputs[i].is_argument()) {
      sources.emplace(*path++, i);
    }
  }
  return sources;
}

}  // namespace

GuardTerm read_guard(const std::string& text, const GuardSources& sources) {
  return GuardReader(text, sources).read_all();
}

Guards::Guards(const ExportedProgram& program) {
  const auto sources = sources_of(program);
  for (const auto& text : program.guards) {
    try {
      guards_.push_back({text, read_guard(text, sources)});
    } catch (const DataError&) {
      unreadable_.push_back(text);
    }
  }
}

void Guards::check(const std::vector<c10::IValue>& inputs) const {
  for (const auto& guard : guards_) {
    std::string reason;
    try {
      if (is_true(evaluate(guard.term, inputs))) {
        continue;
      }
    } catch (const DataError& error) {
      reason = concat(" (", error.what(), ")");
    }
    std::map<std::string, std::string> values;
    add_values(guard.term, inputs, values);
    std::string said;
    for (const auto& [name, value] : values) {
      said += concat(said.empty() ? "" : ", ", printable(name), " is ", printable(value));
    }
    throw InputSizeError(
        concat("the export holds only while ", printable(guard.text.substr(0, 300)), ", and ", said,
               reason, "; fix: pass other sizes, or export with an example of such sizes"));
  }
}

}  // namespace ddp::detail
