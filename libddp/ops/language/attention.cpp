// SPDX-License-Identifier: Apache-2.0
#include "ddp/detail/text_stream.hpp"
#include "ddp/ops/language.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <limits>
#include <optional>
#include <stdexcept>

#include "ops/shared/autocast_off.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::ops {
namespace {

const char* name_of(AttentionBackend backend) {
  for (const auto& [name, candidate] : attention_backend_names()) {
    if (candidate == backend) {
      return name.c_str();
    }
  }
  return "?";
}

template <typename... Args>
[[noreturn]] void refuse(const Args&... message) {
  ddp::detail::TextStream text;
  (text << ... << message);
  throw std::invalid_argument(text.str());
}

constexpr int64_t kCudnnMaxHeadDim = 128;
constexpr int64_t kFlashMaxHeadDim = 256;

/// Why FlashAttention and cuDNN cannot serve these inputs; empty if they can.
std::string unfit_for_kernels(const at::Tensor& query, const at::Tensor& key,
                              int64_t max_head_dim) {
  ddp::detail::TextStream text;
  const int64_t head_dim = query.size(-1);
  if (!query.is_cuda()) {
    text << "it needs a GPU, the tensors are on " << query.device();
  } else if (query.scalar_type() != at::kBFloat16 && query.scalar_type() != at::kHalf) {
    text << "it needs bfloat16 or float16, the tensors are " << query.scalar_type();
  } else if (head_dim % 8 != 0 || head_dim > max_head_dim) {
    text << "it needs a head_dim that is a multiple of 8 and at most " << max_head_dim << ", it is "
         << head_dim;
  } else if (query.numel() == 0 || key.numel() == 0) {
    text << "it needs at least one query and one key, the tensors are " << query.sizes() << " and "
         << key.sizes();
  }
  return text.str();
}

std::string unfit_for_flash(const at::Tensor& query, const at::Tensor& key) {
  return unfit_for_kernels(query, key, kFlashMaxHeadDim);
}

std::string unfit_for_cudnn(const at::Tensor& query, const at::Tensor& key, double dropout_p) {
  auto reason = unfit_for_kernels(query, key, kCudnnMaxHeadDim);
  if (!reason.empty()) {
    return reason;
  }
  // cuDNN has no plan for these lengths.
  if (key.size(2) == 1) {
    return "it needs at least two keys, there is 1";
  }
  return query.size(2) == 1 && dropout_p > 0 ? "it has no dropout for a single query" : "";
}

void require_fit(AttentionBackend backend, const std::string& reason) {
  if (!reason.empty()) {
    refuse("attention backend ", name_of(backend), " cannot be used: ", reason,
           "; fix: use auto or math");
  }
}

AttentionBackend choose(const at::Tensor& query, const at::Tensor& key,
                        const AttentionOptions& options) {
  // cuDNN builds a plan for each new shape. In decoding and evaluation lengths differ, so plans
  // cost more than they save. Gradient recording must not decide: it is off in a checkpointed
  // forward and on in its recomputation.
  if (options.shapes_recur && unfit_for_cudnn(query, key, options.dropout_p).empty()) {
    return AttentionBackend::Cudnn;
  }
  return unfit_for_flash(query, key).empty() ? AttentionBackend::Flash : AttentionBackend::Math;
}

/// `heads` itself if kernels may read them 16 bytes at a time, else a copy. Heads behind positions
/// and slices of a buffer may be unaligned, and the kernels do not check.
at::Tensor in_vectors(const at::Tensor& heads) {
  const int64_t per_vector = 16 / heads.element_size();
  bool fits = detail::is_aligned(heads) && heads.stride(-1) == 1;
  for (int64_t dim = 0; dim + 1 < heads.dim(); ++dim) {
    fits = fits && heads.stride(dim) % per_vector == 0;
  }
  return fits ? heads : heads.clone(at::MemoryFormat::Contiguous);
}

/// `tensor` itself if it is aligned and has these strides, else a copy that has them.
at::Tensor with_strides(const at::Tensor& tensor, at::IntArrayRef strides) {
  bool fits = detail::is_aligned(tensor);
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const auto wanted = strides[static_cast<std::size_t>(dim)];
    fits = fits && (tensor.size(dim) == 1 || tensor.stride(dim) == wanted);
  }
  return fits ? tensor : at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

/// Inputs of a kernel that reads vectors.
struct Vectors {
  Vectors(const at::Tensor& query_in, const at::Tensor& key_in, const at::Tensor& value_in)
      : query(in_vectors(query_in)), key(in_vectors(key_in)), value(in_vectors(value_in)) {}

  /// The kernel's result. Its backward gets the gradient in the result's own strides: it reads
  /// vectors, and LibTorch finds cuDNN's plan by the inputs' strides without the gradient's.
  static at::Tensor result(const at::Tensor& out) {
    if (out.requires_grad()) {
      out.register_hook([strides = out.strides().vec()](const at::Tensor& grad) {
        return with_strides(grad, strides);
      });
    }
    return out;
  }
  bool require_grad() const {
    return at::GradMode::is_enabled() &&
           (query.requires_grad() || key.requires_grad() || value.requires_grad());
  }

  at::Tensor query, key, value;
};

void check_heads(int64_t heads, int64_t kv_heads) {
  if (kv_heads <= 0 || heads % kv_heads != 0) {
    refuse("attention: ", heads, " query heads cannot share ", kv_heads, " key heads evenly");
  }
}

/// Autocast would make the softmax float32, and its backward would refuse a gradient in 16 bits.
at::Tensor by_definition(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const at::Tensor& mask, bool is_causal, const AttentionOptions& options) {
  const AutocastOff no_autocast(query.device().type());
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, mask.defined() ? std::optional(mask) : std::nullopt, options.dropout_p,
      is_causal, {}, options.scale, query.size(1) != key.size(1)));
}

/// Whether LibTorch's memory-efficient kernel can serve Auto: in float32, which cuDNN and Flash
/// lack. Its gradients may differ from run to run.
bool fits_efficient_kernel(const at::Tensor& query, const at::Tensor& key) {
  return query.is_cuda() && query.scalar_type() == at::kFloat && query.size(1) == key.size(1) &&
         query.size(3) % 4 == 0 && query.numel() > 0 && key.numel() > 0 &&
         !at::globalContext().deterministicAlgorithms();
}

at::Tensor with_math(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options) {
  if (query.device().is_cpu() && options.backend == AttentionBackend::Auto) {
    return at::scaled_dot_product_attention(query, key, value, {}, options.dropout_p,
                                            options.is_causal, options.scale,
                                            query.size(1) != key.size(1));
  }
  if (options.backend == AttentionBackend::Auto && fits_efficient_kernel(query, key)) {
    const Vectors in(query, key, value);
    // Only the backward reads the log-sum-exp.
    return Vectors::result(std::get<0>(at::_scaled_dot_product_efficient_attention(
        in.query, in.key, in.value, {}, in.require_grad(), options.dropout_p, options.is_causal,
        options.scale)));
  }
  return by_definition(query, key, value, {}, options.is_causal, options);
}

/// What `mask` adds to the scores. A bool mask is true where a query reads a key.
at::Tensor added_to_scores(const at::Tensor& mask, at::ScalarType dtype) {
  if (mask.is_floating_point()) {
    return mask.to(dtype);
  }
  if (mask.scalar_type() != at::kBool) {
    refuse("an attention mask of ", mask.scalar_type(),
           " has no meaning; fix: a bool mask, true where a query reads a key, or a floating-point "
           "mask, which is added to the scores");
  }
  return at::zeros(mask.sizes(), mask.options().dtype(dtype))
      .masked_fill_(mask.logical_not(), -std::numeric_limits<double>::infinity());
}

/// The definition with a mask. With one query, the query heads of a key head become its queries, so
/// keys and values are not expanded.
at::Tensor with_mask(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options) {
  const auto& mask = options.mask;
  if (options.is_causal || mask.dim() != 4) {
    refuse("an attention mask needs 4 dimensions and excludes is_causal; this mask has ",
           mask.dim(), " dimensions", options.is_causal ? ", and is_causal is set" : "");
  }
  const bool folds = query.size(2) == 1 && mask.size(1) == 1;
  const auto rows = folds ? query.reshape({query.size(0), key.size(1), -1, query.size(3)}) : query;
  const auto out = by_definition(rows, key, value, added_to_scores(mask, query.scalar_type()),
                                 /*is_causal=*/false, options);
  return folds ? out.reshape(query.sizes()) : out;
}

}  // namespace

const std::vector<std::pair<std::string, AttentionBackend>>& attention_backend_names() {
  static const std::vector<std::pair<std::string, AttentionBackend>> names = {
      {"auto", AttentionBackend::Auto},
      {"cudnn", AttentionBackend::Cudnn},
      {"flash", AttentionBackend::Flash},
      {"math", AttentionBackend::Math}};
  return names;
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options) {
  check_heads(query.size(1), key.size(1));
  if (options.is_causal && query.size(2) != key.size(2)) {
    refuse("causal attention needs as many queries as keys, there are ", query.size(2), " and ",
           key.size(2));
  }
  if (options.mask.defined()) {
    return with_mask(query, key, value, options);
  }
  auto backend = options.backend;
  if (backend == AttentionBackend::Auto) {
    backend = choose(query, key, options);
  }
  switch (backend) {
    case AttentionBackend::Cudnn: {
      require_fit(backend, unfit_for_cudnn(query, key, options.dropout_p));
      const Vectors in(query, key, value);
      // Only the backward reads the log-sum-exp.
      return Vectors::result(std::get<0>(at::_scaled_dot_product_cudnn_attention(
          in.query, in.key, in.value, {}, in.require_grad(), options.dropout_p, options.is_causal,
          false, options.scale)));
    }
    case AttentionBackend::Flash: {
      require_fit(backend, unfit_for_flash(query, key));
      const Vectors in(query, key, value);
      return Vectors::result(std::get<0>(at::_scaled_dot_product_flash_attention(
          in.query, in.key, in.value, options.dropout_p, options.is_causal, false, options.scale)));
    }
    default:
      return with_math(query, key, value, options);
  }
}

at::Tensor packed_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& offsets, int64_t max_length,
                            const AttentionOptions& options) {
  check_heads(query.size(1), key.size(1));
  if (options.mask.defined()) {
    refuse("packed attention does not accept a mask: the offsets separate the documents");
  }
  if (options.backend == AttentionBackend::Cudnn) {
    refuse(
        "attention backend cudnn cannot be used with packed documents; fix: use auto or flash, or "
        "put each document into its own row");
  }
  const bool wants_math =
      options.backend == AttentionBackend::Math ||
      (options.backend == AttentionBackend::Auto && !unfit_for_flash(query, key).empty());
  if (!wants_math) {
    require_fit(AttentionBackend::Flash, unfit_for_flash(query, key));
    const Vectors in(query, key, value);
    return Vectors::result(std::get<0>(at::_flash_attention_forward(
        in.query, in.key, in.value, offsets, offsets, max_length, max_length, options.dropout_p,
        options.is_causal, false, options.scale)));
  }
  const auto host = offsets.to(at::kCPU, at::kLong).contiguous();
  const auto* bounds = host.const_data_ptr<int64_t>();
  std::vector<at::Tensor> outputs;
  outputs.reserve(static_cast<size_t>(host.numel()));
  for (int64_t i = 0; i + 1 < host.numel(); ++i) {
    const auto document = [&](const at::Tensor& all) {
      return all.slice(0, bounds[i], bounds[i + 1]).transpose(0, 1).unsqueeze(0);
    };
    const auto out = with_math(document(query), document(key), document(value), options);
    outputs.push_back(out.squeeze(0).transpose(0, 1));
  }
  return at::cat(outputs, 0);
}

}  // namespace ddp::ops
