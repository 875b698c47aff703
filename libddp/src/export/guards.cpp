// SPDX-License-Identifier: Apache-2.0
#include "export/guards.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <string_view>
#include <utility>

#include "core/parse_number.hpp"
#include "ddp/core/error.hpp"
#include "export/stack_functions.hpp"

namespace ddp::detail {
namespace {

using Kind = GuardTerm::Kind;

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
class GuardReader {
 public:
  GuardReader(std::string_view text, const GuardSources& sources)
      : rest_(text), sources_(sources) {}

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

  void skip_blanks() { rest_.remove_prefix(std::min(rest_.find_first_not_of(' '), rest_.size())); }

  GuardTerm made(GuardTerm term) {
    return ++num_terms_ <= kMaxTerms ? std::move(term) : throw DataError("it has too many terms");
  }

  GuardTerm of_kind(Kind kind, GuardTerm left, GuardTerm right) {
    GuardTerm term{.kind = kind};
    term.operands.push_back(std::move(left));
    term.operands.push_back(std::move(right));
    return made(std::move(term));
  }

  GuardTerm call(const std::string& target, std::vector<GuardTerm> operands) {
    GuardTerm term{.kind = Kind::Call, .function = number_function(target)};
    if (!term.function) {
      throw DataError("unknown function " + printable(target));
    }
    term.operands = std::move(operands);
    return made(std::move(term));
  }
  GuardTerm call(const std::string& target, GuardTerm operand) {
    std::vector<GuardTerm> operands;
    operands.push_back(std::move(operand));
    return call(target, std::move(operands));
  }
  GuardTerm call(const std::string& target, GuardTerm left, GuardTerm right) {
    std::vector<GuardTerm> operands;
    operands.push_back(std::move(left));
    operands.push_back(std::move(right));
    return call(target, std::move(operands));
  }

  bool take(std::string_view symbol) {
    skip_blanks();
    if (!rest_.starts_with(symbol)) {
      return false;
    }
    rest_.remove_prefix(symbol.size());
    return true;
  }

  void expect(std::string_view symbol) {
    if (!take(symbol)) {
      fail();
    }
  }

  static bool is_part_of_word(char character) {
    return std::isalnum(static_cast<unsigned char>(character)) != 0 || character == '_';
  }

  bool take_word(std::string_view word) {
    skip_blanks();
    if (!rest_.starts_with(word) ||
        (rest_.size() > word.size() && is_part_of_word(rest_[word.size()]))) {
      return false;
    }
    rest_.remove_prefix(word.size());
    return true;
  }

  std::string_view characters(bool (*belongs)(char)) {
    skip_blanks();
    const auto end = std::find_if_not(rest_.begin(), rest_.end(), belongs);
    const auto result = rest_.substr(0, static_cast<std::size_t>(end - rest_.begin()));
    rest_.remove_prefix(result.size());
    return result;
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
      term = of_kind(Kind::Or, std::move(term), conjunction());
    }
    --depth_;
    return term;
  }

  GuardTerm conjunction() {
    auto term = negation();
    while (take_word("and")) {
      term = of_kind(Kind::And, std::move(term), negation());
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
      all = all ? of_kind(Kind::And, std::move(*all), std::move(term)) : std::move(term);
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
    const auto text = characters([](char c) { return is_part_of_word(c) || c == '.'; });
    if (const auto whole = parse_number<int64_t>(text)) {
      return {.constant = *whole};
    }
    if (const auto real = parse_number<double>(text)) {
      return {.constant = *real};
    }
    fail();
  }

  GuardTerm function_call() {
    auto name = std::string(characters([](char c) { return is_part_of_word(c) || c == '.'; }));
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
    return call(name, std::move(operands));
  }

  std::size_t index() {
    const auto value = parse_number<std::size_t>(
        characters([](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }));
    expect("]");
    return value ? *value : throw DataError("the condition has an index that is no number");
  }

  // L['x'][0].size()[1]
  GuardTerm source() {
    const auto begin = rest_;
    take("L");
    GuardTerm term{.kind = Kind::Value};
    std::string path;
    for (bool is_path = true; is_path;) {
      if (take(".size()[") || take(".shape[")) {
        term.kind = Kind::Size;
        term.dimension = index();
        is_path = false;
      } else if (take(".stride()[")) {
        term.kind = Kind::Stride;
        term.dimension = index();
        is_path = false;
      } else if (take(".storage_offset()")) {
        term.kind = Kind::StorageOffset;
        is_path = false;
      } else if (take("['")) {
        const auto end = rest_.find("']");
        if (end == std::string_view::npos) {
          fail();
        }
        path += concat("['", rest_.substr(0, end), "']");
        rest_.remove_prefix(end + 2);
      } else if (take("[")) {
        path += concat('[', index(), ']');
      } else if (take(".")) {
        path += concat("['", characters(is_part_of_word), "']");
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

  std::string_view rest_;
  const GuardSources& sources_;
  int depth_ = 0;
  int num_terms_ = 0;
};

c10::IValue of_tensor(const GuardTerm& term, const c10::IValue& input) {
  if (!input.isTensor() || !input.toTensor().defined()) {
    throw DataError(term.text + " is of no tensor");
  }
  const auto& tensor = input.toTensor();
  if (term.kind == Kind::StorageOffset) {
    return tensor.storage_offset();
  }
  if (term.dimension >= static_cast<std::size_t>(tensor.dim())) {
    throw DataError(concat(term.text, " is of a tensor with ", tensor.dim(), " dimensions"));
  }
  const auto dimension = static_cast<int64_t>(term.dimension);
  return term.kind == Kind::Size ? tensor.size(dimension) : tensor.stride(dimension);
}

bool is_true(const c10::IValue& value) {
  return value.isBool() ? value.toBool() : value.toScalar().to<double>() != 0;
}

c10::IValue evaluate(const GuardTerm& term, const std::vector<c10::IValue>& inputs) {
  switch (term.kind) {
    case Kind::Constant:
      return term.constant;
    case Kind::Value:
      if (!inputs[term.input].isScalar() || inputs[term.input].isComplexDouble()) {
        throw DataError(term.text + " is no number");
      }
      return inputs[term.input];
    case Kind::Size:
    case Kind::Stride:
    case Kind::StorageOffset:
      return of_tensor(term, inputs[term.input]);
    case Kind::And:
    case Kind::Or: {
      auto left = evaluate(term.operands[0], inputs);
      const bool decides = is_true(left) == (term.kind == Kind::Or);
      return decides ? left : evaluate(term.operands[1], inputs);
    }
    case Kind::Call:
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
  const auto& positional = program.in_spec.children[0].children;
  for (std::size_t i = 0; i < positional.size(); ++i) {
    const auto name = i < program.argument_names.size() ? program.argument_names[i] : concat(i);
    add_sources(positional[i], concat("['", name, "']"), paths);
  }
  add_sources(program.in_spec.children[1], "", paths);
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
    throw SettingsError(concat("the export holds only while ", printable(guard.text.substr(0, 300)),
                               ", and ", said, reason,
                               "; fix: pass other sizes, or export with an example of such sizes"));
  }
}

}  // namespace ddp::detail
