// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include "ddp/ops/decoder.hpp"
#include "ddp/ops/language.hpp"
#include "differential/cases.hpp"

namespace differential {
namespace {

using ddp::ops::AttentionBackend;

torch::Tensor in_double(const torch::Tensor& tensor) {
  return tensor.defined() ? tensor.detach().to(torch::kDouble) : tensor;
}

/// Sets the dtype-dependent members. `roundings`: of results to the dtype that follow each other.
torch::Dtype set_dtype(Draw& draw, Case& one, double roundings = 1) {
  const auto dtype = draw.dtype();
  one.autocast = dtype == torch::kFloat && draw.chance(0.25);
  one.tolerance = roundings * rounding_of(one.autocast ? torch::kBFloat16 : dtype);
  one.text = text_of(dtype, one.autocast ? "autocast" : "");
  return dtype;
}

/// Leading dimensions in front of the last one.
std::vector<int64_t> shape(Draw& draw, int64_t last) {
  std::vector<int64_t> sizes{draw.number(1, 40), last};
  if (draw.chance(0.4)) {
    sizes.insert(sizes.begin(), draw.number(1, 3));
  }
  return sizes;
}

Place maybe(Draw& draw, Case& one, torch::IntArrayRef sizes, torch::Dtype dtype, bool parameter) {
  return draw.chance(0.5)
             ? Place{static_cast<int64_t>(one.add(draw.normal(sizes, dtype), parameter))}
             : Place{};
}

// ---- attention

torch::Tensor attention_twin(const torch::Tensor& q, const torch::Tensor& k_in,
                             const torch::Tensor& v_in, bool causal, const torch::Tensor& mask,
                             double scale) {
  const int64_t share = q.size(1) / k_in.size(1);
  const auto k = k_in.repeat_interleave(share, 1), v = v_in.repeat_interleave(share, 1);
  auto scores = torch::matmul(q, k.transpose(2, 3)) * scale;
  if (causal) {
    const auto later = torch::ones({q.size(2), q.size(2)}, q.options().dtype(torch::kBool)).triu(1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  return torch::matmul((mask.defined() ? scores + mask : scores).softmax(-1), v);
}

int64_t head_dim(Draw& draw) {
  return draw.chance(0.8) ? draw.one_of<int64_t>({8, 16, 24, 40, 64, 128}) : draw.number(1, 48);
}

/// [batch, heads, len, head_dim], often as a projection leaves it: positions in front of heads.
torch::Tensor heads_of(Draw& draw, int64_t batch, int64_t heads, int64_t len, int64_t dim,
                       torch::Dtype dtype) {
  return draw.chance(0.6) ? draw.normal({batch, len, heads, dim}, dtype).transpose(1, 2)
                          : draw.normal({batch, heads, len, dim}, dtype);
}

AttentionBackend backend(Draw& draw, torch::Dtype dtype, int64_t dim, int64_t keys) {
  std::vector<AttentionBackend> choices{AttentionBackend::Auto, AttentionBackend::Auto,
                                        AttentionBackend::Math};
  if (draw.device().is_cuda() && (dtype == torch::kHalf || dtype == torch::kBFloat16) &&
      dim % 8 == 0) {
    choices.insert(choices.end(), 2, AttentionBackend::Flash);
    if (keys > 1) {
      choices.push_back(AttentionBackend::Cudnn);
    }
  }
  return draw.one_of(choices);
}

Case attention(Draw& draw) {
  Case one;
  const auto dtype = set_dtype(draw, one);
  one.autocast = false;
  one.tolerance = 4 * rounding_of(dtype);
  one.floor = 1;  // gradients of scores are differences of numbers near 1
  const int64_t batch = draw.number(1, 3), kv_heads = draw.number(1, 3);
  const int64_t heads = kv_heads * draw.number(1, 3), dim = head_dim(draw);
  const int64_t len = draw.chance(0.2) ? 1 : draw.number(1, 70);
  const bool causal = draw.chance(0.5);
  const int64_t keys = causal ? len : draw.chance(0.2) ? 1 : draw.number(1, 70);
  ddp::ops::AttentionOptions options{.backend = backend(draw, dtype, dim, keys),
                                     .is_causal = causal,
                                     .shapes_recur = draw.chance(0.5)};
  if (draw.chance(0.3)) {
    options.scale = 0.3;
  }
  if (!causal && options.backend == AttentionBackend::Auto && draw.chance(0.3)) {
    const auto open = torch::ones({batch, 1, 1, keys}, torch::kBool);
    open.narrow(3, keys / 2, keys - keys / 2 - 1).fill_(false);
    options.mask = torch::zeros(open.sizes())
                       .masked_fill_(open.logical_not(), -std::numeric_limits<float>::infinity())
                       .to(draw.device());
  }
  one.add(heads_of(draw, batch, heads, len, dim, dtype));
  one.add(heads_of(draw, batch, kv_heads, keys, dim, dtype));
  one.add(heads_of(draw, batch, kv_heads, keys, dim, dtype));
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(dim)));
  one.op = [options](const Tensors& in) {
    return Tensors{ddp::ops::attention(in[0], in[1], in[2], options)};
  };
  one.twin = [causal, scale, mask = in_double(options.mask)](const Tensors& in) {
    return Tensors{attention_twin(in[0], in[1], in[2], causal, mask, scale)};
  };
  one.text += text_of("heads", heads, kv_heads, "len", len, keys, "dim", dim, "causal", causal,
                      "backend", static_cast<int>(options.backend), "mask", options.mask.defined());
  return one;
}

Case packed_attention(Draw& draw) {
  Case one;
  const auto dtype = set_dtype(draw, one);
  one.autocast = false;
  one.tolerance = 4 * rounding_of(dtype);
  one.floor = 1;
  const int64_t kv_heads = draw.number(1, 3), heads = kv_heads * draw.number(1, 3);
  const int64_t dim = head_dim(draw);
  const bool causal = draw.chance(0.7);
  std::vector<int> bounds{0};
  int64_t longest = 0;
  for (int64_t i = draw.number(1, 4); i > 0; --i) {
    const int64_t length = draw.number(1, 20);
    longest = std::max(longest, length);
    bounds.push_back(bounds.back() + static_cast<int>(length));
  }
  const int64_t tokens = bounds.back();
  one.add(draw.normal({tokens, heads, dim}, dtype));
  one.add(draw.normal({tokens, kv_heads, dim}, dtype));
  one.add(draw.normal({tokens, kv_heads, dim}, dtype));
  const auto offsets = torch::tensor(bounds, torch::kInt).to(draw.device());
  one.op = [offsets, longest, causal](const Tensors& in) {
    return Tensors{
        ddp::ops::packed_attention(in[0], in[1], in[2], offsets, longest, {.is_causal = causal})};
  };
  one.twin = [bounds, causal, dim](const Tensors& in) {
    Tensors documents;
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
      const auto part = [&](const torch::Tensor& all) {
        return all.slice(0, bounds[i], bounds[i + 1]).transpose(0, 1).unsqueeze(0);
      };
      documents.push_back(attention_twin(part(in[0]), part(in[1]), part(in[2]), causal, {},
                                         1 / std::sqrt(static_cast<double>(dim)))
                              .squeeze(0)
                              .transpose(0, 1));
    }
    return Tensors{torch::cat(documents, 0)};
  };
  one.text += text_of("tokens", tokens, "heads", heads, kv_heads, "dim", dim);
  return one;
}

torch::Tensor rotated(const torch::Tensor& x, const torch::Tensor& cos, const torch::Tensor& sin) {
  const int64_t half = x.size(-1) / 2;
  const auto a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
  return torch::cat({a * cos - b * sin, b * cos + a * sin}, -1);
}

Case split_heads(Draw& draw) {
  Case one;
  const auto dtype = set_dtype(draw, one);
  one.autocast = false;
  one.tolerance = rounding_of(dtype == torch::kDouble ? torch::kFloat : dtype);
  const int64_t batch = draw.number(1, 3), seq = draw.number(1, 20);
  const int64_t kv_heads = draw.number(1, 3), heads = kv_heads * draw.number(1, 3);
  const int64_t dim = 2 * draw.size(32);
  const bool turns = draw.chance(0.7);
  one.add(draw.normal({batch, seq, (heads + 2 * kv_heads) * dim}, dtype));
  ddp::ops::RotaryAngles angles;
  if (turns) {
    const auto tables = ddp::ops::make_rotary_tables({.head_dim = dim}, 64, draw.device());
    const auto positions =
        torch::randint(64, {batch, seq}, torch::kLong).fill_(draw.number(0, 40)) +
        torch::arange(seq);
    angles = ddp::ops::rotary_angles(tables, positions.to(draw.device()));
  }
  // With a rotation the op may write its input.
  one.op = [=](const Tensors& in) {
    const auto [q, k, v] = ddp::ops::split_heads(in[0] * 1, heads, kv_heads, {.angles = angles});
    return Tensors{q, k, v};
  };
  one.twin = [=](const Tensors& in) {
    const auto all = in[0].reshape({batch, seq, heads + 2 * kv_heads, dim});
    const auto turn = [&](const torch::Tensor& x) {
      return turns ? rotated(x, in_double(angles.cos), in_double(angles.sin)) : x;
    };
    return Tensors{turn(all.narrow(2, 0, heads)), turn(all.narrow(2, heads, kv_heads)),
                   all.narrow(2, heads + kv_heads, kv_heads)};
  };
  one.text += text_of("heads", heads, kv_heads, "dim", dim, "seq", seq, "rotary", turns);
  return one;
}

Case apply_rotary(Draw& draw) {
  Case one;
  const auto dtype = set_dtype(draw, one, 4);
  const int64_t batch = draw.number(1, 3), heads = draw.number(1, 4), seq = draw.number(1, 20);
  const int64_t dim = 2 * draw.size(64);
  one.add(draw.normal({batch, seq, heads, dim}, dtype).transpose(1, 2));
  const std::vector<int64_t> sizes = {draw.one_of<int64_t>({1, batch}), 1, seq, dim / 2};
  const auto angles = draw.one_of<torch::Dtype>({dtype, torch::kFloat});
  const auto cos = draw.normal(sizes, angles), sin = draw.normal(sizes, angles);
  one.op = [=](const Tensors& in) {
    return Tensors{
        ddp::ops::apply_rotary(in[0], torch::cat({cos, cos}, -1), torch::cat({sin, sin}, -1))};
  };
  one.twin = [=](const Tensors& in) { return Tensors{rotated(in[0], cos, sin)}; };
  one.text += text_of("heads", heads, "dim", dim, "seq", seq, "angles", angles);
  return one;
}

// ---- products

Case linear(Draw& draw) {
  Case one;
  const auto dtype = set_dtype(draw, one, 2);
  const int64_t in = draw.size(96), out = draw.size(96);
  const bool transposed = draw.chance(0.3), passes = draw.chance(0.4);
  const auto sizes = shape(draw, in);
  auto result = sizes;
  result.back() = out;
  one.add(draw.normal(sizes, dtype));
  one.add(draw.normal(transposed ? std::vector{in, out} : std::vector{out, in}, dtype, 0.2), true);
  const auto bias = maybe(draw, one, {out}, dtype, true);
  const auto residual = passes ? Place{} : maybe(draw, one, result, dtype, false);
  one.op = [=](const Tensors& inputs) {
    const ddp::ops::LinearOptions options{
        .bias = bias.of(inputs), .residual = residual.of(inputs), .transposed = transposed};
    if (passes) {
      const auto both = ddp::ops::linear_and_residual(inputs[0], inputs[1], options);
      return Tensors{both.product, both.residual};
    }
    return Tensors{ddp::ops::linear(inputs[0], inputs[1], options)};
  };
  one.twin = [=](const Tensors& inputs) {
    auto y = torch::matmul(inputs[0], transposed ? inputs[1] : inputs[1].t());
    y = bias.index < 0 ? y : y + bias.of(inputs);
    y = residual.index < 0 ? y : y + residual.of(inputs);
    return passes ? Tensors{y, inputs[0]} : Tensors{y};
  };
  one.text += text_of("x", torch::IntArrayRef(sizes), "out", out, "transposed", transposed,
                      "passes", passes, "bias", bias.index, "residual", residual.index);
  return one;
}

/// The masks that lora_linear() draws in its next call, scaled.
Tensors lora_masks(Draw& draw, int64_t rows, int64_t in, int64_t rank, std::size_t layers,
                   torch::Dtype dtype, double p) {
  const bool by_kernels = draw.device().is_cuda() &&
                          (dtype == torch::kHalf || dtype == torch::kBFloat16) && in % 64 == 0 &&
                          rank % 8 == 0;
  const auto ones = torch::ones({rows, in}, torch::TensorOptions(dtype).device(draw.device()));
  torch::manual_seed(kMaskSeed);
  Tensors masks;
  for (std::size_t i = 0; i < layers; ++i) {
    const auto kept = by_kernels ? ddp::ops::dropout(ones, p).ne(0)
                                 : std::get<1>(torch::native_dropout(ones, p, true));
    const double share = by_kernels ? std::round(p * 65536) / 65536 : p;
    masks.push_back(kept.to(torch::kDouble) / (1 - share));
  }
  return masks;
}

Case lora_linear(Draw& draw) {
  Case one;
  const auto dtype = set_dtype(draw, one, 3);
  const int64_t in = draw.chance(0.5) ? 64 * draw.number(1, 3) : draw.size(96);
  const int64_t rank = draw.size(24);
  const auto sizes = shape(draw, in);
  const bool gated = draw.chance(0.2);
  std::vector<int64_t> out_sizes;
  int64_t out = 0;
  for (int64_t i = gated ? 2 : draw.number(1, 3); i > 0; --i) {
    out_sizes.push_back(gated && !out_sizes.empty() ? out_sizes[0] : draw.size(48));
    out += out_sizes.back();
  }
  const auto layers = static_cast<int64_t>(out_sizes.size());
  const double p = draw.chance(0.4) ? 0.25 : 0;
  auto result = sizes;
  result.back() = out;
  one.add(draw.normal(sizes, dtype));
  one.add(draw.normal({layers * rank, in}, dtype, 0.2), true);
  one.add(draw.normal({out, rank}, dtype, 0.2), true);
  const auto residual = gated ? Place{} : maybe(draw, one, result, dtype, false);
  const auto weight = draw.normal({out, in}, dtype, 0.2);
  const auto bias = draw.chance(0.5) ? draw.normal({out}, dtype) : torch::Tensor();
  one.draws = p > 0;
  const auto compute = one.autocast ? torch::kBFloat16 : dtype;
  const auto masks =
      p > 0 ? lora_masks(draw, one.inputs[0].numel() / in, in, rank, out_sizes.size(), compute, p)
            : Tensors{};
  one.op = [=](const Tensors& inputs) {
    return Tensors{ddp::ops::lora_linear(inputs[0], weight, inputs[1], inputs[2],
                                         {.scale = 0.5,
                                          .dropout_p = p,
                                          .bias = bias,
                                          .residual = residual.of(inputs),
                                          .out_sizes = out_sizes,
                                          .gated = gated})};
  };
  one.twin = [=](const Tensors& inputs) {
    const auto x = inputs[0].reshape({-1, in});
    Tensors branches;
    int64_t row = 0;
    for (int64_t i = 0; i < layers; ++i) {
      const auto index = static_cast<std::size_t>(i);
      const auto dropped = masks.empty() ? x : x * masks[index];
      branches.push_back(dropped.mm(inputs[1].narrow(0, i * rank, rank).t())
                             .mm(inputs[2].narrow(0, row, out_sizes[index]).t()));
      row += out_sizes[index];
    }
    auto y = (x.mm(in_double(weight).t()) + 0.5 * torch::cat(branches, 1)).view(result);
    y = bias.defined() ? y + in_double(bias) : y;
    y = residual.index < 0 ? y : y + residual.of(inputs);
    return Tensors{gated ? torch::silu(y.narrow(-1, 0, out / 2)) * y.narrow(-1, out / 2, out / 2)
                         : y};
  };
  one.text += text_of("x", torch::IntArrayRef(sizes), "out", torch::IntArrayRef(out_sizes), "rank",
                      rank, "p", p, "gated", gated, "bias", bias.defined());
  return one;
}

Case linear_cross_entropy(Draw& draw) {
  Case one;
  const auto dtype = set_dtype(draw, one, 3);
  // Sums and the softmax are float32 in every dtype.
  one.tolerance = std::max(one.tolerance, 3 * rounding_of(torch::kFloat));
  const int64_t tokens = draw.number(1, 40), dim = draw.size(64), vocab = draw.number(2, 130);
  one.add(draw.normal({tokens, dim}, dtype));
  one.add(draw.normal({vocab, dim}, dtype, 0.2), true);
  const auto bias = maybe(draw, one, {vocab}, dtype, true);
  const auto labels = draw.labels(tokens, vocab);
  const ddp::ops::LinearCrossEntropyOptions options{
      .chunk_tokens = draw.chance(0.4) ? draw.number(1, 16) : 0,
      .label_smoothing = draw.chance(0.4) ? draw.one_of<double>({0.1, 0.5}) : 0,
      .z_loss = draw.chance(0.3) ? 1e-2 : 0};
  one.op = [=](const Tensors& inputs) {
    auto with_bias = options;
    with_bias.bias = bias.of(inputs);
    return Tensors{
        ddp::ops::linear_cross_entropy(inputs[0], inputs[1], labels, with_bias).loss_sum};
  };
  one.twin = [=](const Tensors& inputs) {
    auto logits = inputs[0].mm(inputs[1].t());
    logits = bias.index < 0 ? logits : logits + bias.of(inputs);
    const auto counts = labels.ne(options.ignore_index);
    const auto log_sum = logits.logsumexp(1);
    const auto of_label = logits.gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1);
    const double s = options.label_smoothing;
    const auto losses =
        log_sum - (1 - s) * of_label - s * logits.mean(1) + options.z_loss * log_sum.square();
    return Tensors{(losses * counts).sum()};
  };
  one.text +=
      text_of("tokens", tokens, "dim", dim, "vocab", vocab, "chunk", options.chunk_tokens,
              "smoothing", options.label_smoothing, "z", options.z_loss, "bias", bias.index);
  return one;
}

// ---- norms, branches, activations

torch::Tensor rms_twin(const torch::Tensor& x, const torch::Tensor& weight) {
  return x * (x.square().mean(-1, true) + 1e-5).rsqrt() * weight;
}

Case norm(Draw& draw) {
  Case one;
  const auto dtype = set_dtype(draw, one, 4);
  const int64_t dim = draw.chance(0.1) ? 8 * draw.number(130, 300) : 4 + draw.size(200);
  const auto sizes = shape(draw, dim);
  const bool is_rms = draw.chance(0.5);
  one.add(draw.normal(sizes, dtype));
  one.add(draw.normal({dim}, dtype), true);
  if (!is_rms) {
    one.add(draw.normal({dim}, dtype), true);
  }
  one.op = [=](const Tensors& in) {
    const auto both = is_rms ? ddp::ops::rms_norm(in[0], in[1], 1e-5)
                             : ddp::ops::layer_norm(in[0], in[1], in[2], 1e-5);
    return Tensors{both.normed, both.residual};
  };
  one.twin = [=](const Tensors& in) {
    return Tensors{is_rms ? rms_twin(in[0], in[1]) : torch::layer_norm(in[0], {dim}, in[1], in[2]),
                   in[0]};
  };
  one.text += text_of(is_rms ? "rms" : "layer", torch::IntArrayRef(sizes));
  return one;
}

/// add_branch(), dropout() and add_layer_norm().
Case branch(Draw& draw) {
  Case one;
  const auto dtype = set_dtype(draw, one);
  one.autocast = false;
  one.tolerance = 5 * rounding_of(dtype);
  const int64_t dim = 4 + draw.size(120);
  const auto sizes = shape(draw, dim);
  const double p = draw.chance(0.6) ? draw.one_of<double>({0.1, 0.5}) : 0;
  const bool normed = draw.chance(0.5);
  one.add(draw.normal(sizes, dtype));
  const auto residual = normed ? Place{static_cast<int64_t>(one.add(draw.normal(sizes, dtype)))}
                               : maybe(draw, one, sizes, dtype, false);
  const auto bias = maybe(draw, one, {dim}, dtype, true);
  const auto weight =
      Place{normed ? static_cast<int64_t>(one.add(draw.normal({dim}, dtype), true)) : -1};
  const auto shift =
      Place{normed ? static_cast<int64_t>(one.add(draw.normal({dim}, dtype), true)) : -1};
  const auto run = [=](const torch::Tensor& x, const torch::Tensor& before, const Tensors& in,
                       const torch::Tensor& own_bias) {
    const ddp::ops::BranchOptions options{.bias = own_bias, .dropout_p = p};
    if (!normed) {
      return Tensors{ddp::ops::add_branch(x, before, options)};
    }
    const auto both =
        ddp::ops::add_layer_norm(x, before, weight.of(in), shift.of(in), 1e-5, options);
    return Tensors{both.residual, both.normed};
  };
  one.draws = p > 0;
  torch::Tensor mask = torch::ones(sizes, torch::kDouble).to(draw.device());
  if (p > 0) {
    // The same op on ones shows what it keeps. Without a kernel, ATen drops branch + bias.
    const torch::NoGradGuard no_grad;
    const auto& x = one.inputs[0];
    // Ones in the same layout: ATen draws in the order of memory.
    const auto ones = copy_with_layout(bias.index < 0 ? x : x + bias.of(one.inputs)).fill_(1);
    torch::manual_seed(kMaskSeed);
    mask =
        run(ones, normed ? torch::zeros_like(ones) : torch::Tensor(), one.inputs, {})[0].ne(0).to(
            torch::kDouble);
    mask /= 1 - std::round(p * 65536) / 65536;  // what the kernels draw; ATen's p is as near
  }
  one.tolerance += p > 0 ? 2e-5 : 0;
  one.op = [=](const Tensors& in) { return run(in[0], residual.of(in), in, bias.of(in)); };
  one.twin = [=](const Tensors& in) {
    auto x = bias.index < 0 ? in[0] : in[0] + bias.of(in);
    x = x * mask;
    x = residual.index < 0 ? x : x + residual.of(in);
    return normed ? Tensors{x, torch::layer_norm(x, {dim}, weight.of(in), shift.of(in))}
                  : Tensors{x};
  };
  one.text += text_of(normed ? "add_layer_norm" : "add_branch", torch::IntArrayRef(sizes), "p", p,
                      "bias", bias.index, "residual", residual.index);
  return one;
}

Case activation(Draw& draw) {
  Case one;
  const auto dtype = set_dtype(draw, one, 2);
  const bool gated = draw.chance(0.5), tanh = draw.chance(0.5), separate = draw.chance(0.5);
  const int64_t dim = gated ? 2 * draw.size(80) : draw.size(160);
  const auto sizes = shape(draw, dim);
  one.add(draw.normal(sizes, dtype));
  const auto bias = gated ? Place{} : maybe(draw, one, {dim}, dtype, true);
  one.op = [=](const Tensors& in) {
    const auto parts = in[0].chunk(2, -1);
    return Tensors{!gated     ? ddp::ops::gelu(in[0], {.bias = bias.of(in), .tanh = tanh})
                   : separate ? ddp::ops::swiglu(parts[0], parts[1])
                              : ddp::ops::swiglu(in[0])};
  };
  one.twin = [=](const Tensors& in) {
    if (gated) {
      return Tensors{torch::silu(in[0].narrow(-1, 0, dim / 2)) *
                     in[0].narrow(-1, dim / 2, dim / 2)};
    }
    return Tensors{
        torch::gelu(bias.index < 0 ? in[0] : in[0] + bias.of(in), tanh ? "tanh" : "none")};
  };
  one.text += text_of(gated  ? "swiglu"
                      : tanh ? "gelu tanh"
                             : "gelu",
                      torch::IntArrayRef(sizes), "bias", bias.index, "separate", separate);
  return one;
}

}  // namespace

const std::vector<Row>& language_rows() {
  static const std::vector<Row> rows = {{"attention", attention},
                                        {"packed_attention", packed_attention},
                                        {"split_heads", split_heads},
                                        {"apply_rotary", apply_rotary},
                                        {"linear", linear},
                                        {"lora_linear", lora_linear},
                                        {"linear_cross_entropy", linear_cross_entropy},
                                        {"norm", norm},
                                        {"branch", branch},
                                        {"activation", activation}};
  return rows;
}

}  // namespace differential
