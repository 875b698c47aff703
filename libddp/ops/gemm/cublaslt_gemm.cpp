// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cublaslt_gemm.hpp"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "ops/shared/choice_book.hpp"
#include "ops/shared/flop_counter.hpp"
#include "ops/shared/private_stream.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::ops::detail {
namespace {

constexpr size_t kMaxWorkspaceBytes = size_t{32} << 20;
constexpr int kMaxCandidates = 24;

void check(cublasStatus_t status, const char* what) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "gemm: ", what, " failed with ",
              cublasLtGetStatusName(status));
}

template <typename T, cublasStatus_t (*destroy)(T)>
struct Handle {
  T value = nullptr;
  Handle() = default;
  ~Handle() {
    if (value != nullptr) {
      destroy(value);
    }
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
};
using MatmulDesc = Handle<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using MatrixLayout = Handle<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Handle<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

/// A factor for cublasLt, which is column-major and so sees the transpose.
struct Factor {
  const void* data;
  int64_t leading;
  bool row_major;
};

Factor factor_of(const at::Tensor& matrix, const char* name) {
  const bool row_major = matrix.stride(1) == 1 || matrix.size(1) == 1;
  TORCH_CHECK(row_major || matrix.stride(0) == 1 || matrix.size(0) == 1, "gemm: ", name,
              " with strides ", matrix.strides(), " is neither row-major nor column-major");
  const int64_t leading = row_major ? matrix.stride(0) : matrix.stride(1);
  const int64_t length = matrix.size(row_major ? 1 : 0), count = matrix.size(row_major ? 0 : 1);
  TORCH_CHECK(leading >= length || count == 1, "gemm: ", name, " ", matrix.sizes(),
              " with strides ", matrix.strides(), " overlaps itself; make it contiguous");
  // The stride of a dimension of size 1 is arbitrary, but must be a valid leading dimension.
  return {matrix.const_data_ptr(), std::max(leading, length), row_major};
}

int64_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return static_cast<int64_t>(std::min<uintptr_t>(address & (~address + 1), 256));
}

cudaDataType cuda_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return CUDA_R_32F;
    case at::kBFloat16:
      return CUDA_R_16BF;
    case at::kHalf:
      return CUDA_R_16F;
    case at::kFloat8_e4m3fn:
      return CUDA_R_8F_E4M3;
    default:
      TORCH_CHECK(false, "gemm: unsupported dtype ", dtype);
  }
}

/// One product, with row-major dimensions.
struct Problem {
  int64_t m, n, k;
  Factor a, b;
  void* out;
  int64_t out_leading;
  const void* addend;  ///< C of the product; `out` if nothing else is added
  int64_t addend_leading;
  const void* bias;
  const void* a_scales;  ///< of FP8 factors
  const void* b_scales;
  cudaDataType type, out_type;
  float alpha, beta;
  int device;
  bool deterministic;  ///< the same algorithm in every run, without measuring

  bool has_addend() const { return addend != out; }
  bool is_fp8() const { return type == CUDA_R_8F_E4M3; }

  using Key = std::array<int64_t, 18>;
  Key key() const {
    return {m,
            n,
            k,
            a.leading,
            b.leading,
            out_leading,
            int64_t{a.row_major} * 2 + int64_t{b.row_major},
            int64_t{type},
            int64_t{out_type},
            beta != 0,
            bias != nullptr,
            device,
            deterministic,
            alignment_of(a.data),
            alignment_of(b.data),
            alignment_of(out),
            has_addend() ? addend_leading : 0,
            has_addend() ? alignment_of(addend) : 0};
  }
  /// The name of a choice, independent of the device and of `deterministic`.
  std::string name() const {
    auto numbers = key();
    numbers[kDevice] = numbers[kDevice + 1] = 0;
    std::string text = "cublaslt";
    for (size_t i = 0; i < (has_addend() ? numbers.size() : kAddend); ++i) {
      text += ' ' + std::to_string(numbers[i]);
    }
    return text;
  }
  static constexpr size_t kDevice = 11;  // index in key(), followed by `deterministic`
  static constexpr size_t kAddend = 16;  // index of the addend's numbers
};

void set_layout(MatrixLayout& layout, cudaDataType type, int64_t rows, int64_t columns,
                int64_t leading) {
  check(cublasLtMatrixLayoutCreate(&layout.value, type, static_cast<uint64_t>(rows),
                                   static_cast<uint64_t>(columns), leading),
        "cublasLtMatrixLayoutCreate");
}

/// The descriptors of one shape and the algorithm chosen for it.
class Plan {
 public:
  Plan(cublasLtHandle_t handle, const Problem& p) : handle_(handle) {
    check(cublasLtMatmulDescCreate(&desc_.value, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    // outᵀ [n, m] = bᵀ aᵀ, all column-major.
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.b.row_major ? CUBLAS_OP_N : CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.a.row_major ? CUBLAS_OP_N : CUBLAS_OP_T);
    if (p.bias != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, p.is_fp8() ? p.out_type : p.type);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    }
    if (p.is_fp8()) {
      set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
      set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
      set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
      set_scales(p);
    }
    set_layout(b_, p.type, p.b.row_major ? p.n : p.k, p.b.row_major ? p.k : p.n, p.b.leading);
    set_layout(a_, p.type, p.a.row_major ? p.k : p.m, p.a.row_major ? p.m : p.k, p.a.leading);
    set_layout(out_, p.out_type, p.n, p.m, p.out_leading);
    set_layout(addend_, p.out_type, p.n, p.m, p.addend_leading);
    propose(p);
  }

  void run(const Problem& p, const cublasLtMatmulHeuristicResult_t& choice, void* out,
           void* workspace, cudaStream_t stream) {
    const void* const addend = p.has_addend() ? p.addend : out;
    if (p.bias != nullptr) {
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    }
    if (p.is_fp8()) {
      set_scales(p);
    }
    check(cublasLtMatmul(handle_, desc_.value, &p.alpha, p.b.data, b_.value, p.a.data, a_.value,
                         &p.beta, addend, addend_.value, out, out_.value, &choice.algo, workspace,
                         choice.workspaceSize, stream),
          "cublasLtMatmul");
  }

  /// Keeps only the fastest candidate. The host waits.
  void measure(const Problem& p);

  const cublasLtMatmulHeuristicResult_t& choice() const { return candidates_.front(); }

 private:
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    check(cublasLtMatmulDescSetAttribute(desc_.value, attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute");
  }

  void set_scales(const Problem& p) {
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scales);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scales);
  }

  void propose(const Problem& p) {
    Preference preference;
    check(cublasLtMatmulPreferenceCreate(&preference.value), "cublasLtMatmulPreferenceCreate");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      check(cublasLtMatmulPreferenceSetAttribute(preference.value, attribute, &value, sizeof value),
            "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMaxWorkspaceBytes);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
           static_cast<uint32_t>(alignment_of(p.b.data)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
           static_cast<uint32_t>(alignment_of(p.a.data)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
           static_cast<uint32_t>(alignment_of(p.addend)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(alignment_of(p.out)));
    candidates_.resize(kMaxCandidates);
    int found = 0;
    const auto status = cublasLtMatmulAlgoGetHeuristic(handle_, desc_.value, b_.value, a_.value,
                                                       addend_.value, out_.value, preference.value,
                                                       kMaxCandidates, candidates_.data(), &found);
    TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS && found > 0,
                "gemm: cublasLt has no algorithm for [", p.m, ", ", p.k, "] x [", p.k, ", ", p.n,
                "]: ", cublasLtGetStatusName(status));
    candidates_.resize(static_cast<size_t>(found));
  }

  cublasLtHandle_t handle_;
  MatmulDesc desc_;
  MatrixLayout a_, b_, addend_, out_;
  std::vector<cublasLtMatmulHeuristicResult_t> candidates_;
};

void Plan::measure(const Problem& p) {
  // Only shapes matter, not contents. Products that add may run only once, so their results go to
  // scratch memory.
  const auto bytes = at::TensorOptions().device(at::kCUDA).dtype(at::kByte);
  const auto workspace = at::empty({static_cast<int64_t>(kMaxWorkspaceBytes)}, bytes);
  const int64_t out_bytes = p.m * p.out_leading * (p.out_type == CUDA_R_32F ? 4 : 2);
  const bool reads_out = p.beta != 0 && !p.has_addend();
  const auto scratch = reads_out ? at::zeros({out_bytes}, bytes) : at::Tensor();
  void* const out = reads_out ? scratch.data_ptr() : p.out;
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(p.device));
  const size_t fastest = choose_fastest(p.name(), device, candidates_.size(), [&](size_t i) {
    run(p, candidates_[i], out, workspace.data_ptr(), c10::cuda::getCurrentCUDAStream());
  });
  candidates_ = {candidates_[fastest < candidates_.size() ? fastest : 0]};
}

/// The process's plans, never destroyed: destroying cublasLt's handles after the driver's teardown
/// is undefined.
struct Plans {
  std::mutex mutex;
  std::map<int, cublasLtHandle_t> handles;
  std::map<Problem::Key, std::unique_ptr<Plan>> plans;

  static Plans& instance() {
    static auto* plans = new Plans;
    return *plans;
  }

  cublasLtHandle_t handle(int device) {
    auto& handle = handles[device];
    if (handle == nullptr) {
      check(cublasLtCreate(&handle), "cublasLtCreate");
    }
    return handle;
  }
};

}  // namespace

size_t cublaslt_version() {
  return cublasLtGetVersion();
}

void gemm_by_cublaslt(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                      const GemmOptions& options) {
  const auto row_leading = [](const at::Tensor& matrix, const char* name) {
    TORCH_CHECK(matrix.stride(1) == 1 || matrix.size(1) == 1, "gemm: ", name,
                " must be row-major, not of strides ", matrix.strides());
    return std::max(matrix.stride(0), matrix.size(1));
  };
  const int64_t out_leading = row_leading(out, "out");
  const auto& addend = options.addend;
  const auto bias = options.bias.defined() ? dense(options.bias) : at::Tensor();
  const c10::cuda::CUDAGuard device(a.device());
  Problem problem{.m = a.size(0),
                  .n = b.size(1),
                  .k = a.size(1),
                  .a = factor_of(a, "a"),
                  .b = factor_of(b, "b"),
                  .out = out.mutable_data_ptr(),
                  .out_leading = out_leading,
                  .addend = addend.defined() ? addend.const_data_ptr() : out.const_data_ptr(),
                  .addend_leading = addend.defined() ? row_leading(addend, "addend") : out_leading,
                  .bias = data_or_null(bias),
                  .a_scales = data_or_null(options.a_scales),
                  .b_scales = data_or_null(options.b_scales),
                  .type = cuda_type(a.scalar_type()),
                  .out_type = cuda_type(out.scalar_type()),
                  .alpha = static_cast<float>(options.alpha),
                  .beta = addend.defined() ? 1.0F : static_cast<float>(options.beta),
                  .device = a.device().index(),
                  .deterministic = at::globalContext().deterministicAlgorithms()};
  const CountedOp counted(product_flops(a.size(0), a.size(1), b.size(1)), a.scalar_type());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto& plans = Plans::instance();
  const std::lock_guard lock(plans.mutex);
  auto& plan = plans.plans[problem.key()];
  if (!plan) {
    auto made = std::make_unique<Plan>(plans.handle(problem.device), problem);
    // A choice made in a capture stays: a later eager call must give the replay's bits.
    if (!problem.deterministic && !is_captured(stream)) {
      try {
        made->measure(problem);
      } catch (const c10::OutOfMemoryError&) {
        // The library's first proposal stays.
      }
    }
    plan = std::move(made);
  }
  const auto workspace = at::empty({static_cast<int64_t>(plan->choice().workspaceSize)},
                                   at::TensorOptions().device(a.device()).dtype(at::kByte));
  plan->run(problem, plan->choice(), problem.out, workspace.data_ptr(), stream);
}

}  // namespace ddp::ops::detail
