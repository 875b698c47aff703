// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/flop_counter.hpp"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <atomic>
#include <cmath>
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
std::atomic<bool> has_unknown = false;         // an op without a formula ran
std::atomic<double> num_flops[kNumTypes + 1];  // by dtype; last: float32 convolutions
thread_local int depth = 0;                    // of counted ops, whose own calls do not count

void add(double flops, at::ScalarType dtype, FlopKind kind) {
  if (std::isnan(flops)) {
    has_unknown = true;
    flops = 1;  // the sum is unknown, and its dtype is not
  }
  const bool is_apart = dtype == at::kFloat && kind == FlopKind::Convolution;
  auto& sum = num_flops[is_apart ? kNumTypes : static_cast<size_t>(dtype) % kNumTypes];
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

// Positions of the filter: those of the output, or of a transposed convolution's input. The
// parameters are indices of the op's arguments; 0: it has no such argument.
template <size_t stride, size_t padding, size_t dilation, size_t transposed>
double convolution(Inputs inputs) {
  const auto x = tensor_at(inputs, 0), weight = tensor_at(inputs, 1);
  if (inputs.size() <= std::max({stride, padding, dilation, transposed}) ||
      !have_dims(x, weight, 3)) {
    return 0;
  }
  double positions = static_cast<double>(x.size(0));
  for (int64_t dim = 2; dim < x.dim(); ++dim) {
    const auto i = static_cast<size_t>(dim - 2);
    const int64_t spread = dilation > 0 ? element(inputs[dilation], i) : 1;
    const int64_t reach = spread * (weight.size(dim) - 1) + 1;
    const int64_t padded = x.size(dim) + 2 * element(inputs[padding], i);
    positions *= static_cast<double>(transposed > 0 && inputs[transposed].toBool()
                                         ? x.size(dim)
                                         : (padded - reach) / element(inputs[stride], i) + 1);
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

// Two products for each pair of a query and a key: `passes` is 1 forward and 2 backward, whose
// kernels compute the scores once more. Queries [batch, heads, s_q, d] at `first`, then keys and
// values.
template <size_t first, int passes>
double attention(Inputs inputs) {
  const auto q = tensor_at(inputs, first), k = tensor_at(inputs, first + 1),
             v = tensor_at(inputs, first + 2);
  if (!have_dims(q, k, 4) || !have_dims(q, v, 4)) {
    return 0;
  }
  const double pairs = product_of(q.sizes().slice(0, 3)) * static_cast<double>(k.size(2));
  return 2 * passes * pairs * static_cast<double>(q.size(3) + v.size(3));
}

// Pairs of a query and a key of the same document. The host waits for the documents' ends.
double pairs_of_documents(const at::Tensor& q_ends, const at::Tensor& k_ends) {
  const auto queries = q_ends.to(at::kCPU, at::kDouble).diff();
  const auto keys = k_ends.to(at::kCPU, at::kDouble).diff();
  return queries.mul(keys).sum().item<double>();
}

// Queries [batch, s_q, heads, d] at `first`, or packed documents [tokens, heads, d]. `offsets`: the
// documents' ends in queries and keys; undefined: not packed. In a capture the host cannot wait for
// them.
template <size_t first, size_t offsets, int passes>
double attention_kernel(Inputs inputs) {
  const auto q = tensor_at(inputs, first), k = tensor_at(inputs, first + 1),
             v = tensor_at(inputs, first + 2);
  if (!have_dims(q, k, 3) || !have_dims(q, v, 3)) {
    return 0;
  }
  const auto q_ends = tensor_at(inputs, offsets), k_ends = tensor_at(inputs, offsets + 1);
  double pairs = product_of(q.sizes().slice(0, q.dim() - 2));
  if (!q_ends.defined() || !k_ends.defined()) {
    pairs *= static_cast<double>(k.size(-3));
  } else if (is_capturing(q.device())) {
    return NAN;
  } else {
    pairs = pairs_of_documents(q_ends, k_ends);
  }
  return 2 * passes * pairs * static_cast<double>(q.size(-2) * (q.size(-1) + v.size(-1)));
}

// The kernels of recurrent layers have no formula, and make the sum unknown.
double unknown(Inputs /*inputs*/) {
  return NAN;
}

struct Rule {
  Formula flops;
  FlopKind kind = FlopKind::Product;
};

const std::unordered_map<std::string_view, Rule>& rules() {
  constexpr auto kConvolution = FlopKind::Convolution;
  static const std::unordered_map<std::string_view, Rule> all = {
      {"aten::mm", {matrix_product<0>}},
      {"aten::bmm", {matrix_product<0>}},
      {"aten::_scaled_mm", {matrix_product<0>}},
      {"aten::addmm", {matrix_product<1>}},
      {"aten::addmm_", {matrix_product<1>}},
      {"aten::_addmm_activation", {matrix_product<1>}},
      {"aten::baddbmm", {matrix_product<1>}},
      {"aten::baddbmm_", {matrix_product<1>}},
      {"aten::convolution", {convolution<3, 4, 5, 6>, kConvolution}},
      {"aten::_convolution", {convolution<3, 4, 5, 6>, kConvolution}},
      {"aten::convolution_overrideable", {convolution<3, 4, 5, 6>, kConvolution}},
      {"aten::cudnn_convolution", {convolution<3, 2, 4, 0>, kConvolution}},
      {"aten::_slow_conv2d_forward", {convolution<4, 5, 0, 0>, kConvolution}},
      {"aten::convolution_backward", {convolution_backward, kConvolution}},
      {"aten::_scaled_dot_product_flash_attention", {attention<0, 1>}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", {attention<0, 1>}},
      {"aten::_scaled_dot_product_efficient_attention", {attention<0, 1>}},
      {"aten::_scaled_dot_product_cudnn_attention", {attention<0, 1>}},
      {"aten::_scaled_dot_product_flash_attention_backward", {attention<1, 2>}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", {attention<1, 2>}},
      {"aten::_scaled_dot_product_efficient_attention_backward", {attention<1, 2>}},
      {"aten::_scaled_dot_product_cudnn_attention_backward", {attention<1, 2>}},
      {"aten::_flash_attention_forward", {attention_kernel<0, 3, 1>}},
      {"aten::_flash_attention_backward", {attention_kernel<1, 6, 2>}},
      {"aten::_efficient_attention_forward", {attention_kernel<0, 4, 1>}},
      {"aten::_efficient_attention_backward", {attention_kernel<1, 6, 2>}},
      {"aten::_cudnn_rnn", {unknown}},
      {"aten::miopen_rnn", {unknown}},
      {"aten::mkldnn_rnn_layer", {unknown}},
  };
  return all;
}

size_t index_of_most() {
  return static_cast<size_t>(std::max_element(std::begin(num_flops), std::end(num_flops)) -
                             std::begin(num_flops));
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
  const auto found = rules().find(op.name());
  if (found == rules().end()) {
    return nullptr;
  }
  auto nested = std::make_unique<Nested>();  // also of ops that the formula calls
  const Rule& rule = found->second;
  const bool is_factor = tensor_at(op.inputs(), 1).defined();  // else a list of weights
  const auto factor = tensor_at(op.inputs(), is_factor ? 1 : 0);
  if (is_counting && factor.defined()) {
    add(rule.flops(op.inputs()), computed_dtype(factor), rule.kind);
  }
  return nested;
}

}  // namespace

FlopCounter::FlopCounter() {
  if (!is_taken.exchange(true)) {
    std::fill(std::begin(num_flops), std::end(num_flops), 0.0);
    has_unknown = false;
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
  if (!callback_) {
    return 0;
  }
  return has_unknown ? NAN : std::accumulate(std::begin(num_flops), std::end(num_flops), 0.0);
}

at::ScalarType FlopCounter::dtype() const {
  if (!callback_ || !(num_flops[index_of_most()] > 0)) {
    return at::ScalarType::Undefined;
  }
  return are_float_convolutions() ? at::kFloat : static_cast<at::ScalarType>(index_of_most());
}

bool FlopCounter::are_float_convolutions() const {
  return callback_ && index_of_most() == kNumTypes;
}

void note_uncounted_ops() {
  has_unknown = has_unknown || is_counting;
}

// Autograd's threads have the callback of the thread that began the backward.
CountedOp::CountedOp(double flops, at::ScalarType dtype, FlopKind kind) {
  if (depth++ == 0 && is_counting && at::hasThreadLocalCallbacks()) {
    add(flops, dtype, kind);
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
