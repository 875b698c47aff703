// SPDX-License-Identifier: Apache-2.0
// Ops of language models. The library's kernels need CUDA (compute capability 8.0), bf16 or fp16,
// and sizes that are multiples of 8 unless an op says otherwise. Else PyTorch's ops run.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/detail/model_weights.hpp"

namespace ddp::ops {

/// Kernel of attention().
enum class AttentionBackend {
  Auto,   ///< Cudnn (with shapes_recur), Flash, in float32 LibTorch's, else Math; CPU: LibTorch's
  Cudnn,  ///< CUDA, bfloat16 or float16; at least two keys
  Flash,  ///< FlashAttention 2; CUDA, bfloat16 or float16
  Math,   ///< plain matrix products and a softmax: the definition; any device and dtype
};
/// Names for settings.
const std::vector<std::pair<std::string, AttentionBackend>>& attention_backend_names();

struct AttentionOptions {
  AttentionBackend backend = AttentionBackend::Auto;  ///< if it cannot serve the inputs: an error
  bool is_causal = true;                              ///< position i reads 0 … i
  double dropout_p = 0;           ///< of the attention weights; 0 outside training
  std::optional<double> scale{};  ///< of the scores; unset: 1 / sqrt(head_dim)
  /// Broadcast to [batch, heads, q_len, k_len]: bool, true if a query reads a key, or floating
  /// point and added to the scores (-inf: not read). Other dtypes are refused. Always uses the Math
  /// backend. Not with is_causal, not for packed documents.
  at::Tensor mask{};
  /// As in training. Use the same value in a checkpointed forward and in its recomputation;
  /// otherwise another kernel may run.
  bool shapes_recur = true;
};

/// softmax(scale * Q Kᵀ + mask) V for each head. If `key` has fewer heads than `query` (a divisor),
/// this is grouped-query attention: query head h reads key head h / (heads / kv_heads).
///
///   query [batch, heads, q_len, head_dim], key and value [batch, kv_heads, k_len, head_dim]
///   -> [batch, heads, q_len, head_dim]
///
/// Any strides and offsets; inputs that a kernel cannot read 16 bytes at a time are copied. With
/// `is_causal` position i reads 0 … i, and q_len must be k_len. Throws std::invalid_argument naming
/// the backend if it cannot serve the inputs.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options = {});

/// For concatenated documents, each attending only to itself.
///
///   query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim]
///   offsets int32 [documents + 1]: where each begins; first 0, last `tokens`, ascending
///   max_length: of the longest document, known to the host
///   -> [tokens, heads, head_dim]
///
/// Auto runs Flash if possible. Math and the CPU read `offsets` on the host. Cudnn is refused.
at::Tensor packed_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& offsets, int64_t max_length,
                            const AttentionOptions& options = {});

/// Rotary position embedding (Su et al., arXiv:2104.09864) in the layout of Hugging Face's Llama
/// and Qwen2: element i of a head is rotated with element i + head_dim / 2.
struct RotaryOptions {
  int64_t head_dim = 128;  ///< even
  double theta = 10000;    ///< base of the wavelengths
  /// none; linear: positions / factor; llama3: long wavelengths / factor, blended between
  /// low_freq_factor and high_freq_factor of original_max_positions
  std::string scaling = "none";
  double factor = 1;                      ///< of linear and llama3
  double low_freq_factor = 1;             ///< of llama3
  double high_freq_factor = 4;            ///< of llama3, above low_freq_factor
  int64_t original_max_positions = 8192;  ///< of llama3: positions that the model was trained on
};

/// Cosines and sines by position, float32 [positions, head_dim / 2] each.
struct RotaryTables {
  at::Tensor cos, sin;  ///< float32 [positions, head_dim / 2] each
};
/// Makes the tables of positions 0 … num_positions - 1.
RotaryTables make_rotary_tables(const RotaryOptions& options, int64_t num_positions,
                                at::Device device);

/// Of `positions` int64 [..., seq], once for all layers: float32 [..., seq, 1, head_dim / 2] each.
struct RotaryAngles {
  at::Tensor cos, sin;  ///< float32 [..., seq, 1, head_dim / 2] each
};
/// Reads the tables at `positions`, which must be below num_positions.
RotaryAngles rotary_angles(const RotaryTables& tables, const at::Tensor& positions);

/// [batch, seq, heads or kv_heads, head_dim] each
struct AttentionHeads {
  at::Tensor query, key, value;  ///< views of qkv, or rotated copies
};

struct SplitHeadsOptions {
  RotaryAngles angles{};  ///< rotate queries and keys (in float32); undefined: not
  /// The projections' bias [width of qkv], which qkv includes and linear() got detached: its
  /// gradient comes from the pass that writes qkv's.
  at::Tensor added_bias{};
};

/// Splits the results of the q, k and v projections.
///
///   qkv [batch, seq, (heads + 2 kv_heads) * head_dim]: queries, keys, values
///
/// The heads may share qkv's memory, and on CUDA the rotation is written there: do not read qkv
/// afterwards. The backward writes one gradient of qkv. The kernel needs a head_dim that is a
/// multiple of 16.
AttentionHeads split_heads(const at::Tensor& qkv, int64_t heads, int64_t kv_heads,
                           const SplitHeadsOptions& options = {});

struct LinearOptions {
  at::Tensor bias{};          ///< [out]
  at::Tensor residual{};      ///< [..., out], added to the result
  bool transposed = false;    ///< `weight` is [in, out], as in GPT-2
  bool skips_result = false;  ///< its values may stay undefined: see is_recomputing()
};

/// input weightᵀ + bias + residual, in autocast's dtype, else the input's.
///
///   input [..., in], weight [out, in] -> [..., out]
///
/// The kernel (in strict float32 too) is one product, and gradients of weight and bias go straight
/// to their bucket (of joined rows by a copy).
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                  const LinearOptions& options = {});

/// Result of linear_and_residual().
struct LinearResidual {
  at::Tensor product;   ///< linear(input)
  at::Tensor residual;  ///< the input
};
/// linear() of an input that is also a residual connection. Take that from the result: its gradient
/// is then added in the product that makes the input's.
LinearResidual linear_and_residual(const at::Tensor& input, const at::Tensor& weight,
                                   const LinearOptions& options = {});

/// Result of a norm whose input is also a residual connection.
struct NormedResidual {
  at::Tensor normed;    ///< [..., dim]
  at::Tensor residual;  ///< the norm's input
};

/// LayerNorm over the last dimension (Ba et al., arXiv:1607.06450), and RMSNorm (Zhang, Sennrich,
/// arXiv:1910.07467): x / sqrt(mean(x²) + eps) * weight.
///
///   x [..., dim], weight and bias [dim] -> [..., dim]
///
/// Take the residual connection from the result instead of x: its gradient is then added to the
/// norm's in one kernel. The kernels (dim at most 8,192) sum in float32 and round the result once
/// to x's dtype, also under autocast.
NormedResidual layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                          double eps);
NormedResidual rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);  ///< see above

/// Options of add_branch().
struct BranchOptions {
  at::Tensor bias{};     ///< [dim], added to the branch
  double dropout_p = 0;  ///< of branch + bias; 0 outside training
};

/// residual + dropout(branch + bias), the end of a residual branch.
///
///   branch and residual [..., dim] -> [..., dim]
///
/// The kernel stores no mask: the backward draws the same numbers again, and the bias's gradient
/// comes from the same pass. p is rounded to a multiple of 2^-16 there.
at::Tensor add_branch(const at::Tensor& branch, const at::Tensor& residual,
                      const BranchOptions& options = {});
/// layer_norm() of that sum, which is the result's `residual`; on CUDA in one pass.
NormedResidual add_layer_norm(const at::Tensor& branch, const at::Tensor& residual,
                              const at::Tensor& weight, const at::Tensor& bias, double eps,
                              const BranchOptions& options = {});
/// add_branch() without bias and residual.
at::Tensor dropout(const at::Tensor& x, double p);

struct GeluOptions {
  at::Tensor bias{};  ///< [dim], added to x
  bool tanh = false;  ///< the approximation by tanh, as in GPT-2
};

/// gelu(x + bias), x Phi(x) (Hendrycks, Gimpel, arXiv:1606.08415). Saves only x. Give the bias here
/// instead of to linear(): the kernel's backward makes the bias's gradient in the same pass.
at::Tensor gelu(const at::Tensor& x, const GeluOptions& options = {});

/// silu(gate) * up (Shazeer, arXiv:2002.05202). Saves only its input.
///
///   gate_up [..., 2 * width], gate first -> [..., width]
at::Tensor swiglu(const at::Tensor& gate_up);

struct LoraLinearOptions {
  double scale = 1;       ///< alpha / rank
  double dropout_p = 0;   ///< of the low-rank branch's input; 0 outside training
  at::Tensor bias{};      ///< [out]
  at::Tensor residual{};  ///< [..., out], added to the result
  /// Several layers that read the same input, with all their rows in `weight` and in B and all
  /// their ranks in A: the number of outputs of each. Each draws its own dropout.
  std::vector<int64_t> out_sizes{};
  /// The layers are gate and up: returns swiglu() of their results, [..., out / 2], whose backward
  /// then makes the FP8 gradient in the same pass. Without residual.
  bool gated = false;
  bool skips_result = false;  ///< its values may stay undefined: see is_recomputing()
  /// Of `weight`, which is then not read: rows of the input and of the result's gradient are
  /// converted to FP8 likewise for the products with it. In bf16 on CUDA with compute capability
  /// 9.0 tensor cores multiply FP8 (sizes multiples of 16); elsewhere the same numbers as float32.
  std::optional<Fp8Weight> fp8{};
};

/// x Wᵀ + bias + residual + scale * (dropout(x) Aᵀ) Bᵀ: a frozen layer with a trained low-rank
/// update (Hu et al., arXiv:2106.09685). The product B A is never formed.
///
///   input [..., in], weight [out, in], lora_a [layers * rank, in], lora_b [out, rank]
///   -> [..., out]
///
/// Computes in the common dtype of input and weight. A and B may be float32 (then also their
/// gradients). `weight` and `bias` may be trained too, `weight` without fp8 only. In bf16 and fp16
/// on CUDA (in a multiple of 64, rank of 8) no mask is stored: the backward draws the same numbers
/// again.
at::Tensor lora_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& lora_a,
                       const at::Tensor& lora_b, LoraLinearOptions options = {});

inline constexpr int64_t kIgnoreIndex = -100;  ///< label of rows that do not count

struct LinearCrossEntropyOptions {
  int64_t chunk_tokens = 0;             ///< rows of logits in memory at a time; 0: all
  int64_t ignore_index = kIgnoreIndex;  ///< label of rows that do not count
  at::Tensor bias{};                    ///< [vocab], added to the logits
  double label_smoothing = 0;  ///< s in [0, 1]: share of the target spread over the vocabulary
  double z_loss = 0;  ///< z >= 0: weight of the squared log-partition (PaLM, arXiv:2204.02311)
};
struct LinearCrossEntropyResult {
  at::Tensor loss_sum;     ///< float32, 0-dim: sum over the rows that are not ignored
  at::Tensor num_correct;  ///< int64, 0-dim: rows whose largest logit is the label
  at::Tensor num_targets;  ///< int64, 0-dim: rows that are not ignored
};

/// The head of a language model and its loss, with logits = hidden weightᵀ + bias in hidden's dtype
/// and sums in float32. With L = logsumexp(logits[t]), row t adds
///
///   L - (1 - s) logits[t, labels[t]] - s mean(logits[t]) + z L²
///
///   hidden [tokens, dim], weight [vocab, dim], labels int64 [tokens] (ignore_index: ignored)
///
/// A label outside the vocabulary gives NaN. If all rows are ignored, the sum and all gradients are
/// 0, also in the mean, which is NaN. The gradient of the logits takes their place, so
/// memory holds one copy of them until the backward. With chunk_tokens the forward computes the
/// gradients of hidden, weight and bias instead. Products with odd row lengths are four to six
/// times slower: see pad_rows().
LinearCrossEntropyResult linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                              const at::Tensor& labels,
                                              const LinearCrossEntropyOptions& options = {});

/// Runs `function(inputs)` without saving activations, and again in the backward with the same
/// random numbers of the CPU and of the inputs' devices (torch.utils.checkpoint with
/// use_reentrant=True). Apart from `inputs` and parameters, `function` must not depend on anything
/// that changes in between. A parameter may be used in only one checkpointed call per backward.
/// torch::autograd::grad() and backward() with `inputs` throw. At least one input must require a
/// gradient, or no gradient flows.
at::Tensor checkpoint(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function,
                      const std::vector<at::Tensor>& inputs);
/// The same for a function with several results. Results that the loss does not use have no
/// gradient.
std::vector<at::Tensor> checkpoint(
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& function,
    const std::vector<at::Tensor>& inputs);

}  // namespace ddp::ops
