// SPDX-License-Identifier: Apache-2.0
// PowerSGD sends each gradient M [n, m] as P [n, r] and Q [m, r] with M ~ P Q^T. The approximation
// error is added to the next gradient (error feedback). Q starts from the last one (warm start).
// Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019,
// algorithms 1 and 2. A backward whose sums are not finite changes neither the error nor Q.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "reduce/hooks/comm_hook_table.hpp"

namespace ddp::detail {
namespace {

constexpr double kTiny = 1e-8;  // added to norms: a column of zeros stays zero, not NaN

// `tensor` itself, or a float32 copy of half tensors: norms, kTiny and loss scales may be beyond
// the range of fp16, 6e-8 to 65504.
at::Tensor widened(const at::Tensor& tensor) {
  return tensor.to(tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// Makes the columns of `matrix` [n, r] orthonormal in place (modified Gram-Schmidt; r is small).
void orthogonalize_(const at::Tensor& matrix) {
  const at::Tensor wide = widened(matrix);
  const int64_t columns = wide.size(1);
  for (int64_t i = 0; i < columns; ++i) {
    auto column = wide.narrow(1, i, 1);
    column.div_(column.norm().add_(kTiny));
    if (i + 1 < columns) {
      auto rest = wide.narrow(1, i + 1, columns - i - 1);
      rest.sub_((column * rest).sum(0, /*keepdim=*/true) * column);
    }
  }
  matrix.copy_(wide);
}

class PowerSgdHook final : public CommHook {
 public:
  explicit PowerSgdHook(const PowerSgdOptions& options) : options_(options) {}

  std::string name() const override {
    return concat("powersgd rank=", options_.rank, " start_step=", options_.start_step,
                  " min_compression_rate=", options_.min_compression_rate, " seed=", options_.seed);
  }
  bool capturable() const override { return false; }  // steps_ and the first Q are host state
  bool reads_count() const override { return true; }  // the error is one of the final gradient

  void reset() override {
    states_.clear();
    is_finite_ = at::Tensor();
  }

  void start(GradBucket& bucket) override {
    auto& state = states_[bucket.index];
    state.full = steps_ < options_.start_step;
    if (bucket.is_last) {
      ++steps_;
    }
    if (bucket.inverse_count.defined()) {
      bucket.buffer.mul_(bucket.inverse_count);
    } else {
      bucket.buffer.div_(bucket.divisor);
    }
    if (state.full) {
      state.work = bucket.communicator->all_reduce(bucket.buffer, ReduceOp::Sum);
      return;
    }
    is_finite_ = at::Tensor();
    prepare(bucket, state);
    rescale_error(bucket, state);
    bucket.buffer.add_(state.error);
    state.rest = state.rest_indices.empty() ? at::Tensor() : pack_rest(bucket, state);
    for (auto& matrix : state.matrices) {
      matrix.previous_q = matrix.q.clone();
      orthogonalize_(matrix.q);
      at::mm_out(matrix.p, view_of(bucket, matrix), matrix.q);
    }
    GroupScope group(*bucket.communicator);
    if (state.rest.defined()) {
      state.rest_work = bucket.communicator->all_reduce(state.rest, ReduceOp::Sum);
    }
    if (state.p_memory.defined()) {
      state.work = bucket.communicator->all_reduce(state.p_memory, ReduceOp::Sum);
    }
  }

  void finish(GradBucket& bucket) override {
    auto& state = states_[bucket.index];
    if (state.full) {
      wait(state);
    } else {
      finish_low_rank(bucket, state);
    }
    if (bucket.inverse_count.defined()) {
      bucket.buffer.mul_(bucket.inverse_count != 0);  // the error is not a gradient of no item
    }
  }

 private:
  struct Matrix {
    size_t index;  // of the gradient in the bucket
    int64_t n, m;
    at::Tensor p, q;        // views of p_memory, q_memory: [n, r], [m, r]
    at::Tensor previous_q;  // q before this backward
    at::Tensor error;       // view of State::error, [n, m]
  };
  struct State {
    bool full = true;
    std::vector<Matrix> matrices;
    std::vector<size_t> rest_indices;  // gradients sent in full
    at::Tensor p_memory, q_memory, rest;
    at::Tensor error;  // like the bucket, zero outside matrices
    at::Tensor scale;  // the loss scale of `error`; undefined: 1
    WorkPtr work, rest_work;
  };

  /// Dense memory whose first dimension is the outermost: contiguous or channels_last.
  static bool is_row_by_row(const at::Tensor& gradient, int64_t row_numel) {
    return gradient.is_non_overlapping_and_dense() &&
           (gradient.size(0) == 1 || gradient.stride(0) == row_numel);
  }

  // In memory order, for any strides: the column order is equal on all ranks.
  static at::Tensor view_of(const GradBucket& bucket, const Matrix& matrix) {
    return bucket.gradients[matrix.index].as_strided({matrix.n, matrix.m}, {matrix.m, 1});
  }

  static void wait(State& state) {
    for (auto* work : {&state.work, &state.rest_work}) {
      if (*work) {
        std::exchange(*work, nullptr)->wait();
      }
    }
  }

  // Selects the gradients that shrink and allocates their factors, once per bucket and layout.
  void prepare(const GradBucket& bucket, State& state) {
    if (!state.matrices.empty() || !state.rest_indices.empty()) {
      return;
    }
    int64_t p_numel = 0;
    int64_t q_numel = 0;
    for (size_t i = 0; i < bucket.gradients.size(); ++i) {
      const auto& gradient = bucket.gradients[i];
      const int64_t n = gradient.dim() > 0 ? gradient.size(0) : 1;
      const int64_t m = gradient.numel() / std::max<int64_t>(1, n);
      const int64_t rank = std::min({n, m, options_.rank});
      const bool shrinks = gradient.dim() >= 2 && is_row_by_row(gradient, m) &&
                           static_cast<double>((n + m) * rank) * options_.min_compression_rate <
                               static_cast<double>(n * m);
      if (!shrinks) {
        state.rest_indices.push_back(i);
        continue;
      }
      state.matrices.push_back(
          {.index = i, .n = n, .m = m, .p = {}, .q = {}, .previous_q = {}, .error = {}});
      p_numel += n * rank;
      q_numel += m * rank;
    }
    state.error = at::zeros_like(bucket.buffer);
    if (state.matrices.empty()) {
      return;
    }
    state.p_memory = at::empty({p_numel}, bucket.buffer.options());
    // Equal on all ranks: drawn on the CPU from one seed.
    auto generator =
        at::detail::createCPUGenerator(options_.seed + static_cast<uint64_t>(bucket.index));
    state.q_memory = at::randn({q_numel}, generator, at::TensorOptions().dtype(at::kFloat))
                         .to(bucket.buffer.options());
    p_numel = q_numel = 0;
    for (auto& matrix : state.matrices) {
      const int64_t rank = std::min({matrix.n, matrix.m, options_.rank});
      matrix.p = state.p_memory.narrow(0, p_numel, matrix.n * rank).view({matrix.n, rank});
      matrix.q = state.q_memory.narrow(0, q_numel, matrix.m * rank).view({matrix.m, rank});
      p_numel += matrix.n * rank;
      q_numel += matrix.m * rank;
      const auto offset =
          bucket.gradients[matrix.index].storage_offset() - bucket.buffer.storage_offset();
      matrix.error = state.error.narrow(0, offset, matrix.n * matrix.m).view({matrix.n, matrix.m});
    }
  }

  // The error is in units of the loss scale of its backward.
  static void rescale_error(const GradBucket& bucket, State& state) {
    const at::Tensor scale = bucket.loss_scale.defined() ? bucket.loss_scale.clone() : at::Tensor();
    if (scale.defined() || state.scale.defined()) {
      const at::Tensor error = widened(state.error);
      if (!state.scale.defined()) {
        error.mul_(scale);
      } else if (!scale.defined()) {
        error.div_(state.scale);
      } else {
        error.mul_(scale / state.scale);
      }
      state.error.copy_(error);
    }
    state.scale = scale;
  }

  // Whether the sums of all buckets of this backward are finite: 0-dim, without a host wait, equal
  // on all ranks. If they are not, the optimizer skips the step, and no bucket keeps anything of
  // it. The same holds for a weighted backward without an item. The norm of P is infinite where
  // orthogonalize_ would make a column of zeros of it.
  const at::Tensor& all_finite(const GradBucket& bucket) {
    if (!is_finite_.defined()) {
      std::vector<at::Tensor> finite{at::ones({}, bucket.buffer.options().dtype(at::kBool))};
      for (auto& [index, state] : states_) {
        wait(state);
        if (state.p_memory.defined()) {
          finite.push_back(at::isfinite(at::linalg_vector_norm(widened(state.p_memory))));
        }
        if (state.rest.defined() && state.rest.numel() > 0) {
          const double largest = std::numeric_limits<double>::infinity();
          finite.push_back(at::isfinite(at::linalg_vector_norm(state.rest, largest)));
        }
      }
      if (bucket.inverse_count.defined()) {
        finite.push_back((bucket.inverse_count != 0).squeeze());
      }
      is_finite_ = at::stack(finite).all();
    }
    return is_finite_;
  }

  static at::Tensor pack_rest(const GradBucket& bucket, const State& state) {
    std::vector<at::Tensor> parts;
    for (const size_t index : state.rest_indices) {
      parts.push_back(bucket.gradients[index].reshape({-1}));
    }
    return at::cat(parts);
  }

  void finish_low_rank(GradBucket& bucket, State& state) {
    const at::Tensor& finite = all_finite(bucket);
    for (auto& matrix : state.matrices) {
      orthogonalize_(matrix.p);
      at::mm_out(matrix.q, view_of(bucket, matrix).t(), matrix.p);
    }
    if (state.q_memory.defined()) {
      bucket.communicator->all_reduce(state.q_memory, ReduceOp::Sum)->wait();
    }
    for (auto& matrix : state.matrices) {
      finish_matrix(bucket, matrix, finite);
    }
    int64_t offset = 0;
    for (const size_t index : state.rest_indices) {
      auto gradient = bucket.gradients[index];
      gradient.copy_(state.rest.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
      offset += gradient.numel();
    }
    state.rest = at::Tensor();
  }

  // Leaves the mean P Q^T in the bucket. The new error is this rank's gradient minus its share of
  // the mean. The ranks share the mean equally, so that their errors add up to the whole error.
  // Columns of Q that are zero stay as before this backward: they would be zero for ever.
  static void finish_matrix(const GradBucket& bucket, Matrix& matrix, const at::Tensor& finite) {
    const at::Tensor norms = at::linalg_vector_norm(widened(matrix.q), 2, at::IntArrayRef{0}, true);
    const at::Tensor is_kept = at::logical_and(finite, at::isfinite(norms).all());
    const at::Tensor mean = at::mm(matrix.p, matrix.q.t());
    at::Tensor gradient = view_of(bucket, matrix);
    gradient.sub_(mean, 1.0 / bucket.communicator->world_size());
    at::where_out(matrix.error, is_kept, gradient, matrix.error);
    gradient.copy_(mean);
    at::where_out(matrix.q, at::logical_and(is_kept, norms > kTiny), matrix.q, matrix.previous_q);
  }

  PowerSgdOptions options_;
  int64_t steps_ = 0;
  std::map<int, State> states_;
  at::Tensor is_finite_;  // see all_finite(); undefined until the first finish() of a backward
};

}  // namespace

std::shared_ptr<CommHook> make_powersgd_hook(const PowerSgdOptions& options) {
  const auto refuse = [](const char* name, auto value, const char* limit) {
    throw SettingsError(concat(name, "=", value, " must be ", limit));
  };
  if (options.rank < 1) {
    refuse("ddp.powersgd_rank", options.rank,
           "1 or more, because rank 0 would send every matrix as zeros");
  }
  if (options.start_step < 0) {
    refuse("ddp.powersgd_start_step", options.start_step, "0 or more");
  }
  if (!(options.min_compression_rate > 0)) {
    refuse("PowerSGD: min_compression_rate", options.min_compression_rate, "above 0");
  }
  return std::make_shared<PowerSgdHook>(options);
}

}  // namespace ddp::detail
