// SPDX-License-Identifier: Apache-2.0
// Arithmetic on sizes with Python's rules: floor division, a remainder with the divisor's sign, and
// no wrap-around.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "ddp/core/error.hpp"
#include "export/stack_functions.hpp"

namespace ddp::detail {
namespace {

using c10::IValue;
using Unary = IValue (*)(const IValue&);
using Binary = IValue (*)(const IValue&, const IValue&);

bool is_float(const IValue& a, const IValue& b) {
  return a.isDouble() || b.isDouble();
}

double real(const IValue& value) {
  return value.isDouble() ? value.toDouble() : value.toScalar().to<double>();
}

int64_t whole(const IValue& value) {
  return value.isBool() ? value.toBool() : value.toInt();
}

// By reference, because the operation that says whether it overflowed also writes the result.
int64_t checked(bool overflowed, const int64_t& result) {
  if (overflowed) {
    throw DataError("arithmetic on sizes leaves the range of 64 bits");
  }
  return result;
}

void check_divisor(bool is_zero) {
  if (is_zero) {
    throw DataError("arithmetic on sizes divides by zero");
  }
}

int64_t floor_divide(int64_t a, int64_t b) {
  check_divisor(b == 0);
  checked(a == INT64_MIN && b == -1, 0);
  const int64_t quotient = a / b;
  return quotient * b != a && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

IValue add(const IValue& a, const IValue& b) {
  int64_t sum = 0;
  return is_float(a, b) ? IValue(real(a) + real(b))
                        : IValue(checked(__builtin_add_overflow(whole(a), whole(b), &sum), sum));
}

IValue subtract(const IValue& a, const IValue& b) {
  int64_t difference = 0;
  return is_float(a, b)
             ? IValue(real(a) - real(b))
             : IValue(checked(__builtin_sub_overflow(whole(a), whole(b), &difference), difference));
}

IValue multiply(const IValue& a, const IValue& b) {
  int64_t product = 0;
  return is_float(a, b)
             ? IValue(real(a) * real(b))
             : IValue(checked(__builtin_mul_overflow(whole(a), whole(b), &product), product));
}

IValue divide(const IValue& a, const IValue& b) {
  check_divisor(real(b) == 0);
  return real(a) / real(b);
}

// With the sign of `b`.
double float_remainder(double a, double b) {
  const double rest = std::fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

IValue floor_division(const IValue& a, const IValue& b) {
  if (!is_float(a, b)) {
    return floor_divide(whole(a), whole(b));
  }
  check_divisor(real(b) == 0);
  // As in Python, of the part without the remainder: 1.0 // 0.1 is 9.
  const double whole_part = (real(a) - float_remainder(real(a), real(b))) / real(b);
  const double quotient = std::floor(whole_part);
  return whole_part - quotient > 0.5 ? quotient + 1 : quotient;
}

IValue remainder(const IValue& a, const IValue& b) {
  if (!is_float(a, b)) {
    check_divisor(whole(b) == 0);
    const int64_t rest = whole(b) == -1 ? 0 : whole(a) % whole(b);
    return rest != 0 && (rest < 0) != (whole(b) < 0) ? rest + whole(b) : rest;
  }
  check_divisor(real(b) == 0);
  return float_remainder(real(a), real(b));
}

IValue power(const IValue& a, const IValue& b) {
  if (is_float(a, b) || whole(b) < 0) {
    return std::pow(real(a), real(b));
  }
  int64_t result = 1, base = whole(a);
  for (int64_t rest = whole(b); rest > 0; rest >>= 1) {
    checked((rest & 1) != 0 && __builtin_mul_overflow(result, base, &result), result);
    checked(rest > 1 && __builtin_mul_overflow(base, base, &base), base);
  }
  return result;
}

template <typename Compare>
bool compare(const IValue& a, const IValue& b, Compare compare) {
  return is_float(a, b) ? compare(real(a), real(b)) : compare(whole(a), whole(b));
}

IValue truncated(const IValue& a) {
  const double value = real(a);
  if (!a.isDouble()) {
    return whole(a);
  }
  checked(!(std::abs(value) < 9.2e18), 0);
  return static_cast<int64_t>(value);
}

int64_t shift_by(const IValue& b) {
  checked(whole(b) < 0 || whole(b) > 62, 0);
  return whole(b);
}

const std::map<std::string, Binary> kBinary = {
    {"_operator.add", add},
    {"_operator.sub", subtract},
    {"_operator.mul", multiply},
    {"_operator.truediv", divide},
    {"_operator.floordiv", floor_division},
    {"_operator.mod", remainder},
    {"_operator.pow", power},
    {"_operator.eq",
     [](const IValue& a, const IValue& b) -> IValue { return compare(a, b, std::equal_to<>()); }},
    {"_operator.ne",
     [](const IValue& a, const IValue& b) -> IValue {
       return compare(a, b, std::not_equal_to<>());
     }},
    {"_operator.lt",
     [](const IValue& a, const IValue& b) -> IValue { return compare(a, b, std::less<>()); }},
    {"_operator.le",
     [](const IValue& a, const IValue& b) -> IValue { return compare(a, b, std::less_equal<>()); }},
    {"_operator.gt",
     [](const IValue& a, const IValue& b) -> IValue { return compare(a, b, std::greater<>()); }},
    {"_operator.ge",
     [](const IValue& a, const IValue& b) -> IValue {
       return compare(a, b, std::greater_equal<>());
     }},
    {"_operator.and_",
     [](const IValue& a, const IValue& b) -> IValue {
       return a.isBool() && b.isBool() ? IValue(a.toBool() && b.toBool())
                                       : IValue(whole(a) & whole(b));
     }},
    {"_operator.or_",
     [](const IValue& a, const IValue& b) -> IValue {
       return a.isBool() && b.isBool() ? IValue(a.toBool() || b.toBool())
                                       : IValue(whole(a) | whole(b));
     }},
    {"_operator.lshift",
     [](const IValue& a, const IValue& b) { return multiply(a, int64_t{1} << shift_by(b)); }},
    {"_operator.rshift",
     [](const IValue& a, const IValue& b) -> IValue { return whole(a) >> shift_by(b); }},
    {"torch.sym_max",
     [](const IValue& a, const IValue& b) -> IValue {
       return is_float(a, b) ? IValue(std::max(real(a), real(b)))
                             : IValue(std::max(whole(a), whole(b)));
     }},
    {"torch.sym_min",
     [](const IValue& a, const IValue& b) -> IValue {
       return is_float(a, b) ? IValue(std::min(real(a), real(b)))
                             : IValue(std::min(whole(a), whole(b)));
     }},
};

const std::map<std::string, Unary> kUnary = {
    {"_operator.neg",
     [](const IValue& a) {
       return a.isDouble() ? IValue(-a.toDouble()) : subtract(int64_t{0}, a);
     }},
    {"_operator.pos", [](const IValue& a) { return a; }},
    {"torch.sym_not", [](const IValue& a) -> IValue { return !is_true(a); }},
    {"torch.sym_float", [](const IValue& a) -> IValue { return real(a); }},
    {"torch.sym_int", truncated},
    {"math.trunc", truncated},
    {"torch.sym_sqrt", [](const IValue& a) -> IValue { return std::sqrt(real(a)); }},
    {"torch._sym_sqrt", [](const IValue& a) -> IValue { return std::sqrt(real(a)); }},
};

void require_operands(const ValueStack& stack, std::size_t count) {
  if (stack.size() != count) {
    throw DataError(concat("arithmetic on sizes has ", stack.size(), " operands, not ", count));
  }
}

void sym_ite(ValueStack& stack, const CallContext&) {
  require_operands(stack, 3);
  auto result = is_true(stack[0]) ? stack[1] : stack[2];
  stack = {std::move(result)};
}

}  // namespace

bool is_true(const IValue& number) {
  return number.isBool() ? number.toBool() : real(number) != 0;
}

StackFunction number_function(const std::string& target) {
  if (target == "torch.sym_ite") {
    return sym_ite;
  }
  if (const auto found = kBinary.find(target); found != kBinary.end()) {
    return [function = found->second](ValueStack& stack, const CallContext&) {
      require_operands(stack, 2);
      stack = {function(stack[0], stack[1])};
    };
  }
  if (const auto found = kUnary.find(target); found != kUnary.end()) {
    return [function = found->second](ValueStack& stack, const CallContext&) {
      require_operands(stack, 1);
      stack = {function(stack[0])};
    };
  }
  return {};
}

}  // namespace ddp::detail
