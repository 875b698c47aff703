// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/flop_counter.hpp"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <numeric>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ops/shared/timing_event.hpp"

namespace ddp::ops::detail {
namespace {

using Inputs = c10::ArrayRef<const c10::IValue>;
using Formula = double (*)(Inputs inputs);

constexpr size_t kNumTypes = static_cast<size_t>(at::ScalarType::NumOptions);

std::atomic<bool> is_taken = false;  // by a FlopCounter
std::atomic<bool> is_counting = false;
std::atomic<double> num_flops[kNumTypes];
thread_local int depth = 0;  // of counted ops, whose own calls do not count

void add(double flops, at::ScalarType dtype) {
  auto& sum = num_flops[static_cast<size_t>(dtype) % kNumTypes];
  double before = sum.load(std::memory_order_relaxed);
  while (!sum.compare_exchange_weak(before, before + flops, std::memory_order_relaxed)) {
  }
}

// Autocast converts float32 factors inside the op.
at::ScalarType computed_dtype(const at::Tensor& factor) {
  const auto dtype = factor.scalar_type();
  const auto device = factor.device().type();
  return dtype == at::kFloat && at::autocast::is_autocast_enabled(device)
             ? at::autocast::get_autocast_dtype(device)
             : dtype;
}

double product_of(at::IntArrayRef sizes) {
  double product = 1;
  for (const int64_t size : sizes) {
    product *= static_cast<double>(size);
  }
  return product;
}

at::Tensor tensor_at(Inputs inputs, size_t index) {
  return index < inputs.size() && inputs[index].isTensor() ? inputs[index].toTensor()
                                                           : at::Tensor();
}

bool have_dims(const at::Tensor& a, const at::Tensor& b, int64_t dims) {
  return a.defined() && b.defined() && a.dim() >= dims && b.dim() >= dims;
}

// a [..., m, k] times b [..., k, n]; the factors begin at `first`.
template <size_t first>
double matrix_product(Inputs inputs) {
  const auto a = tensor_at(inputs, first), b = tensor_at(inputs, first + 1);
  return have_dims(a, b, 2) ? 2 * product_of(a.sizes()) * static_cast<double>(b.size(-1)) : 0;
}

// An element of a list that may have one element for all dimensions.
int64_t element(const c10::IValue& list, size_t index) {
  const auto values = list.isIntList() ? list.toIntVector() : std::vector<int64_t>{1};
  return values.at(std::min(index, values.size() - 1));
}

// Positions of the filter: those of the output, or of a transposed convolution's input.
double convolution(Inputs inputs) {
  const auto x = tensor_at(inputs, 0), weight = tensor_at(inputs, 1);
  if (inputs.size() < 7 || !have_dims(x, weight, 3)) {
    return 0;
  }
  double positions = static_cast<double>(x.size(0));
  for (int64_t dim = 2; dim < x.dim(); ++dim) {
    const auto i = static_cast<size_t>(dim - 2);
    const int64_t reach = element(inputs[5], i) * (weight.size(dim) - 1) + 1;
    const int64_t padded = x.size(dim) + 2 * element(inputs[4], i);
    positions *= static_cast<double>(
        inputs[6].toBool() ? x.size(dim) : (padded - reach) / element(inputs[3], i) + 1);
  }
  return 2 * product_of(weight.sizes()) * positions;
}

double convolution_backward(Inputs inputs) {
  const auto grad = tensor_at(inputs, 0), x = tensor_at(inputs, 1), weight = tensor_at(inputs, 2);
  if (inputs.size() < 11 || !have_dims(grad, x, 3) || !weight.defined()) {
    return 0;
  }
  const auto mask = inputs[10].toBoolList();
  const int passes = static_cast<int>(mask.get(0)) + static_cast<int>(mask.get(1));
  const auto& at_filter = inputs[7].toBool() ? x : grad;
  return passes * convolution_flops(weight, at_filter);
}

// Queries [batch, heads, s_q, d] at `first`, then keys and values; `of_keys` products with the
// queries' width and `of_values` with the values' width.
template <size_t first, int of_keys, int of_values>
double attention(Inputs inputs) {
  const auto q = tensor_at(inputs, first), k = tensor_at(inputs, first + 1),
             v = tensor_at(inputs, first + 2);
  if (!have_dims(q, k, 4) || !have_dims(q, v, 4)) {
    return 0;
  }
  const double scores = product_of(q.sizes().slice(0, 3)) * static_cast<double>(k.size(2));
  return 2 * scores *
         (of_keys * static_cast<double>(q.size(3)) + of_values * static_cast<double>(v.size(3)));
}

// Packed documents [tokens, heads, d] with their offsets at `offsets`, for which the host waits. In
// a capture it cannot, and all documents count as long as the longest, which follows the offsets.
template <size_t first, size_t offsets, int products>
double packed_attention(Inputs inputs) {
  const auto q = tensor_at(inputs, first), ends = tensor_at(inputs, offsets);
  if (!q.defined() || q.dim() != 3 || !ends.defined()) {
    return 0;
  }
  const double pairs = is_capturing(q.device())
                           ? static_cast<double>(q.size(0) * inputs[offsets + 2].toInt())
                           : ends.to(at::kCPU, at::kDouble).diff().square().sum().item<double>();
  return 2 * products * pairs * static_cast<double>(q.size(1) * q.size(2));
}

const std::unordered_map<std::string_view, Formula>& formulas() {
  static const std::unordered_map<std::string_view, Formula> all = {
      {"aten::mm", matrix_product<0>},
      {"aten::bmm", matrix_product<0>},
      {"aten::_scaled_mm", matrix_product<0>},
      {"aten::addmm", matrix_product<1>},
      {"aten::addmm_", matrix_product<1>},
      {"aten::_addmm_activation", matrix_product<1>},
      {"aten::baddbmm", matrix_product<1>},
      {"aten::baddbmm_", matrix_product<1>},
      {"aten::convolution", convolution},
      {"aten::convolution_backward", convolution_backward},
      {"aten::_scaled_dot_product_flash_attention", attention<0, 1, 1>},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention<0, 1, 1>},
      {"aten::_scaled_dot_product_efficient_attention", attention<0, 1, 1>},
      {"aten::_scaled_dot_product_cudnn_attention", attention<0, 1, 1>},
      {"aten::_scaled_dot_product_flash_attention_backward", attention<1, 3, 2>},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", attention<1, 3, 2>},
      {"aten::_scaled_dot_product_efficient_attention_backward", attention<1, 3, 2>},
      {"aten::_scaled_dot_product_cudnn_attention_backward", attention<1, 3, 2>},
      {"aten::_flash_attention_forward", packed_attention<0, 3, 2>},
      {"aten::_flash_attention_backward", packed_attention<1, 6, 5>},
  };
  return all;
}

class Nested : public at::ObserverContext {
 public:
  Nested() { ++depth; }
  ~Nested() override { --depth; }
  Nested(const Nested&) = delete;
  Nested& operator=(const Nested&) = delete;
};

// The context lives until the op ends, on the same thread.
std::unique_ptr<at::ObserverContext> begin_op(const at::RecordFunction& op) {
  if (depth > 0) {
    return nullptr;
  }
  const auto formula = formulas().find(op.name());
  if (formula == formulas().end()) {
    return nullptr;
  }
  auto nested = std::make_unique<Nested>();       // also of ops that the formula calls
  const auto factor = tensor_at(op.inputs(), 1);  // of each formula
  if (is_counting && factor.defined()) {
    add(formula->second(op.inputs()), computed_dtype(factor));
  }
  return nested;
}

}  // namespace

FlopCounter::FlopCounter() {
  if (!is_taken.exchange(true)) {
    std::fill(std::begin(num_flops), std::end(num_flops), 0.0);
    is_counting = true;
    callback_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(begin_op).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
}

FlopCounter::~FlopCounter() {
  if (callback_) {
    at::removeCallback(*callback_);
    is_counting = false;
    is_taken = false;
  }
}

void FlopCounter::set_paused(bool on) {
  if (callback_) {
    is_counting = !on;
  }
}

double FlopCounter::flops() const {
  return callback_ ? std::accumulate(std::begin(num_flops), std::end(num_flops), 0.0) : 0;
}

at::ScalarType FlopCounter::dtype() const {
  const auto* const most = std::max_element(std::begin(num_flops), std::end(num_flops));
  return flops() > 0 ? static_cast<at::ScalarType>(most - std::begin(num_flops))
                     : at::ScalarType::Undefined;
}

CountedOp::CountedOp(double flops, at::ScalarType dtype) {
  if (depth++ == 0 && is_counting) {
    add(flops, dtype);
  }
}

CountedOp::~CountedOp() {
  --depth;
}

double convolution_flops(const at::Tensor& weight, const at::Tensor& output) {
  return 2 * product_of(weight.sizes()) * static_cast<double>(output.size(0)) *
         product_of(output.sizes().slice(2));
}

}  // namespace ddp::ops::detail
