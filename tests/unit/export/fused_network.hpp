// SPDX-License-Identifier: Apache-2.0
// Programs of a few layers, trained with fusion and without.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <limits>

#include "export/checkpoint_blocks.hpp"
#include "export/fusion/fusion.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/export/archive_builder.hpp"

namespace export_test {

using Counts = std::map<std::string, int>;
using Inputs = std::vector<std::pair<std::string, Json>>;

inline Counts fused(const ArchiveBuilder& archive, const std::vector<std::string>& blocks = {}) {
  auto program = ddp::detail::read_program(archive.program().dump());
  ddp::detail::checkpoint_blocks(program, blocks);
  return ddp::detail::fuse(program);
}

inline Json integers(const std::vector<int64_t>& values) {
  return {{"as_ints", values}};
}
inline Json dtype_name(at::ScalarType type) {
  return {{"as_scalar_type", dtype_code(type)}};
}

/// A program of one tensor x. A function takes the names of its inputs and returns its result's.
struct Network : ArchiveBuilder {
  explicit Network(const std::vector<int64_t>& sizes = {4, 8, 8},
                   at::ScalarType weight_type = at::kFloat)
      : channels(sizes.front()), type(weight_type) {
    at::manual_seed(5);
    std::vector<Json> dimensions = {symbol("s0")};
    for (const auto size : sizes) {
      dimensions.push_back(integer(size));
    }
    input("x", dimensions);
    ranges["s0"] = {{"min_val", 2}, {"max_val", 8}};
  }
  std::string call(const std::string& op, const Inputs& arguments) {
    const auto result = ddp::concat("v", nodes.size());
    node("torch.ops.aten." + op, arguments, {tensor(result)});
    return result;
  }
  std::string weight(const std::vector<int64_t>& sizes) {
    const auto name = ddp::concat("w", weights.size());
    parameter(name, (at::randn(sizes) * 0.5).to(type));
    auto& dimensions = values["p_" + name]["sizes"] = Json::array();
    for (const auto size : sizes) {
      dimensions.push_back(integer(size));
    }
    return "p_" + name;
  }
  std::string statistics(const at::Tensor& value) {
    const auto name = ddp::concat("s", weights.size());
    buffer(name, value.to(type));
    return "b_" + name;
  }
  /// Patches side by side of images of three channels.
  std::string patches(const std::string& x, int64_t patch) {
    return call("conv2d.default", {{"input", tensor(x)},
                                   {"weight", tensor(weight({8, 3, patch, patch}))},
                                   {"bias", tensor(weight({8}))},
                                   {"stride", integers({patch, patch})}});
  }
  std::string conv(const std::string& x, int64_t kernel, int64_t stride = 1) {
    return call("conv2d.default", {{"input", tensor(x)},
                                   {"weight", tensor(weight({channels, channels, kernel, kernel}))},
                                   {"bias", {{"as_none", Json::array()}}},
                                   {"stride", integers({stride, stride})},
                                   {"padding", integers({kernel / 2, kernel / 2})}});
  }
  std::string norm(const std::string& x, const std::string& mean = "", bool training = true,
                   const std::string& factors = "") {
    return call("batch_norm.default",
                {{"input", tensor(x)},
                 {"weight", tensor(factors.empty() ? weight({channels}) : factors)},
                 {"bias", tensor(weight({channels}))},
                 {"running_mean", tensor(mean.empty() ? statistics(at::zeros({channels})) : mean)},
                 {"running_var", tensor(statistics(at::ones({channels})))},
                 {"training", truth(training)},
                 {"momentum", number(0.1)},
                 {"eps", number(1e-5)},
                 {"cudnn_enabled", truth(true)}});
  }
  std::string relu(const std::string& x, bool in_place = false) {
    return call(in_place ? "relu_.default" : "relu.default", {{"self", tensor(x)}});
  }
  std::string add(const std::string& a, const std::string& b, bool in_place = false,
                  int64_t alpha = 1) {
    return call(in_place ? "add_.Tensor" : "add.Tensor",
                {{"self", tensor(a)}, {"other", tensor(b)}, {"alpha", integer(alpha)}});
  }
  std::string pool(const std::string& x, int64_t kernel = 3, bool ceil_mode = false) {
    return call("max_pool2d.default", {{"self", tensor(x)},
                                       {"kernel_size", integers({kernel, kernel})},
                                       {"stride", integers({2, 2})},
                                       {"padding", integers({1, 1})},
                                       {"dilation", integers({1, 1})},
                                       {"ceil_mode", truth(ceil_mode)}});
  }
  std::string head(const std::string& x, int64_t pixels = 1, int64_t start_dim = 1) {
    const auto mean = call("adaptive_avg_pool2d.default",
                           {{"self", tensor(x)}, {"output_size", integers({pixels, pixels})}});
    const auto flat = flatten(mean, start_dim);
    const int64_t width = start_dim == 1 ? channels * pixels * pixels : pixels * pixels;
    return linear_layer(flat, 3, width, true);
  }
  // Of transformers.
  std::string unary(const std::string& op, const std::string& x) {
    return call(op, {{"self", tensor(x)}});
  }
  std::string with(const std::string& op, const std::string& x, double value,
                   const std::string& name = "other") {
    return call(op, {{"self", tensor(x)}, {name, number(value)}});
  }
  std::string multiply(const std::string& a, const std::string& b) {
    return call("mul.Tensor", {{"self", tensor(a)}, {"other", tensor(b)}});
  }
  std::string view(const std::string& x, const std::vector<int64_t>& sizes) {
    return call("view.default", {{"self", tensor(x)}, {"size", integers(sizes)}});
  }
  std::string linear_layer(const std::string& x, int64_t wide, int64_t narrow, bool has_bias) {
    Inputs arguments = {{"input", tensor(x)}, {"weight", tensor(weight({wide, narrow}))}};
    if (has_bias) {
      arguments.push_back({"bias", tensor(weight({wide}))});
    }
    return call("linear.default", arguments);
  }
  /// transformers' Conv1D: x in rows, addmm, and back.
  std::string conv1d(const std::string& x, int64_t width, const std::vector<int64_t>& sizes) {
    const auto rows = view(x, {-1, width});
    const auto product = call("addmm.default", {{"self", tensor(weight({sizes.back()}))},
                                                {"mat1", tensor(rows)},
                                                {"mat2", tensor(weight({width, sizes.back()}))}});
    return view(product, sizes);
  }
  std::string layer_norm(const std::string& x, int64_t dim) {
    return call("layer_norm.default", {{"input", tensor(x)},
                                       {"normalized_shape", integers({dim})},
                                       {"weight", tensor(weight({dim}))},
                                       {"bias", tensor(weight({dim}))},
                                       {"eps", number(1e-5)}});
  }
  /// Returns the normed value and the wide one.
  std::pair<std::string, std::string> rms_norm(const std::string& x, int64_t dim,
                                               double exponent = 2, int64_t dim_of_mean = -1) {
    const auto wide = to(x, at::kFloat);
    const auto square =
        call("pow.Tensor_Scalar", {{"self", tensor(wide)}, {"exponent", number(exponent)}});
    const auto mean = call(
        "mean.dim",
        {{"self", tensor(square)}, {"dim", integers({dim_of_mean})}, {"keepdim", truth(true)}});
    const auto scaled = multiply(wide, unary("rsqrt.default", with("add.Tensor", mean, 1e-6)));
    const auto narrow = to(scaled, type);
    return {multiply(weight({dim}), narrow), wide};
  }
  std::string dropout(const std::string& x, double p, bool train = true) {
    return call("dropout.default",
                {{"input", tensor(x)}, {"p", number(p)}, {"train", truth(train)}});
  }
  std::string composed_gelu(const std::string& x, double factor = 0.044715) {
    const auto half = with("mul.Tensor", x, 0.5);
    const auto cube = with("pow.Tensor_Scalar", x, 3.0, "exponent");
    const auto sum = add(x, with("mul.Tensor", cube, factor));
    const auto tanh = unary("tanh.default", with("mul.Tensor", sum, 0.7978845608028654));
    return multiply(half, with("add.Tensor", tanh, 1.0));
  }
  std::string attend(const std::string& query, const std::string& key, const std::string& value,
                     const Inputs& options = {}) {
    Inputs arguments = {{"query", tensor(query)}, {"key", tensor(key)}, {"value", tensor(value)}};
    arguments.insert(arguments.end(), options.begin(), options.end());
    return call("scaled_dot_product_attention.default", arguments);
  }
  std::string to(const std::string& x, at::ScalarType dtype) {
    return call("to.dtype", {{"self", tensor(x)}, {"dtype", dtype_name(dtype)}});
  }
  /// An export leaves out what is the default.
  std::string flatten(const std::string& x, int64_t start_dim = 0, int64_t end_dim = -1) {
    Inputs arguments = {{"self", tensor(x)}};
    if (start_dim != 0) {
      arguments.push_back({"start_dim", integer(start_dim)});
    }
    if (end_dim != -1) {
      arguments.push_back({"end_dim", integer(end_dim)});
    }
    return call("flatten.using_ints", arguments);
  }
  std::string transpose(const std::string& x, int64_t dim0, int64_t dim1) {
    return call("transpose.int",
                {{"self", tensor(x)}, {"dim0", integer(dim0)}, {"dim1", integer(dim1)}});
  }
  std::string unary_at(const std::string& op, const std::string& x, int64_t dim) {
    return call(op, {{"self", tensor(x)}, {"dim", integer(dim)}});
  }
  std::string select(const std::string& x, int64_t dim, int64_t index) {
    return call("select.int",
                {{"self", tensor(x)}, {"dim", integer(dim)}, {"index", integer(index)}});
  }
  std::string slice(const std::string& x, int64_t dim, int64_t start, int64_t end) {
    return call("slice.Tensor", {{"self", tensor(x)},
                                 {"dim", integer(dim)},
                                 {"start", integer(start)},
                                 {"end", integer(end)}});
  }
  std::string cat(const std::string& a, const std::string& b, int64_t dim = -1) {
    return call("cat.default", {{"tensors", {{"as_tensors", {{{"name", a}}, {{"name", b}}}}}},
                                {"dim", integer(dim)}});
  }
  /// x cut at `half` along `dim`, the parts exchanged.
  std::string rotate_half(const std::string& x, int64_t half, int64_t dim = 3) {
    const auto first = slice(x, dim, 0, half);
    const auto second = slice(x, dim, half, std::numeric_limits<int64_t>::max());
    return cat(unary("neg.default", second), first);
  }
  std::string rotary(const std::string& x, const std::string& cos, const std::string& sin,
                     int64_t half = 4, int64_t dim = 3) {
    const auto straight = multiply(x, cos);
    return add(straight, multiply(rotate_half(x, half, dim), sin));
  }
  Network& returns(const std::string& value) {
    output(tensor(value));
    return *this;
  }

  int64_t channels;     // of images
  at::ScalarType type;  // of weights and inputs
};

inline at::Tensor images(int64_t channels = 4) {
  at::manual_seed(2);
  return at::randn({3, channels, 8, 8});
}
/// Two heads of 8 tokens with 8 values.
inline at::Tensor tokens() {
  at::manual_seed(2);
  return at::randn({3, 2, 8, 8});
}
/// x [batch, 8, 8].
inline at::Tensor sequences() {
  return tokens().select(1, 0).contiguous();
}
/// Eight values for each sample.
inline at::Tensor vectors() {
  return tokens().select(1, 0).select(1, 0);
}

struct Run {
  bool fuse = false;
  std::vector<std::string> checkpoint_blocks = {};
  at::Device device = at::kCPU;
  bool autocasts = false;                                  // to bfloat16, in the forward
  at::MemoryFormat format = at::MemoryFormat::Contiguous;  // of filters
};

/// Autocast to bfloat16 until the result is destroyed.
inline std::shared_ptr<void> autocast_on(at::DeviceType type) {
  at::autocast::set_autocast_enabled(type, true);
  return {nullptr, [type](void*) {
            at::autocast::set_autocast_enabled(type, false);
            at::autocast::clear_cache();
          }};
}

inline at::Tensor forward(ddp::ExportedModule& module, const at::Tensor& x, const Run& run) {
  const auto autocast = run.autocasts ? autocast_on(run.device.type()) : nullptr;
  return module->forward(x).toTensor();
}

/// Outputs, gradients and state of two steps.
inline std::vector<at::Tensor> train(const Network& net, const at::Tensor& x, const Run& run) {
  auto module = load(net, {.checkpoint_blocks = run.checkpoint_blocks, .fuse = run.fuse});
  module->to(run.device);
  for (auto& parameter : module->parameters()) {
    if (parameter.dim() == 4) {
      parameter.set_data(parameter.data().contiguous(run.format));
    }
  }
  std::vector<at::Tensor> tensors;
  for (int step = 0; step < 2; ++step) {
    at::manual_seed(9);
    const auto output = forward(module, x.to(run.device, net.type), run);
    output.square().mean().backward();
    tensors.push_back(output.detach().clone());
    const at::NoGradGuard no_grad;
    for (auto& parameter : module->parameters()) {
      tensors.push_back(parameter.grad().clone());
      parameter.sub_(0.1 * parameter.grad());
      parameter.mutable_grad().reset();
    }
  }
  for (const auto& buffer : module->buffers()) {
    tensors.push_back(buffer.clone());
  }
  return tensors;
}

/// On the CPU the numbers stay.
inline void check_equal(const Network& net, const at::Tensor& x,
                        const std::vector<std::string>& blocks = {}) {
  const auto plain = train(net, x, {});
  const auto replaced = train(net, x, {.fuse = true, .checkpoint_blocks = blocks});
  REQUIRE(plain.size() == replaced.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    INFO("tensor " << i);
    CHECK(plain[i].scalar_type() == replaced[i].scalar_type());
    CHECK(at::equal(plain[i], replaced[i]));
  }
}

/// How Swin merges patches of x [batch, 8, 8, 8]: the slices that it joins, and what differs from
/// it.
struct PatchMerging {
  bool first_fastest = true;
  int64_t step = 2, end = std::numeric_limits<int64_t>::max(), dim = -1;
  int64_t last = 3;  // the place in a block of the last slice
  int64_t first = 1, second = 2;
};
inline Network merged_patches(const PatchMerging& merging = {}, at::ScalarType type = at::kFloat) {
  Network net({8, 8, 8}, type);
  const auto x = net.linear_layer("x", 8, 8, true);
  const auto sliced = [&](const std::string& value, int64_t dim, int64_t start) {
    return net.call("slice.Tensor", {{"self", tensor(value)},
                                     {"dim", integer(dim)},
                                     {"start", integer(start)},
                                     {"end", integer(merging.end)},
                                     {"step", integer(merging.step)}});
  };
  Json parts = Json::array();
  for (int64_t part = 0; part < 4; ++part) {
    const int64_t place = part == 3 ? merging.last : part;
    const auto fast = place % 2, slow = place / 2;
    const auto rows = sliced(x, merging.first, merging.first_fastest ? fast : slow);
    parts.push_back({{"name", sliced(rows, merging.second, merging.first_fastest ? slow : fast)}});
  }
  const auto joined = net.call(
      "cat.default", {{"tensors", {{"as_tensors", parts}}}, {"dim", integer(merging.dim)}});
  return net.returns(net.unary("gelu.default", joined));
}

// A stem and two residual blocks, the second with a convolution in its shortcut.
inline Network residual_network(int64_t channels = 4, at::ScalarType type = at::kFloat) {
  Network net({channels, 8, 8}, type);
  auto x = net.pool(net.relu(net.norm(net.conv("x", 3)), true));
  auto y = net.relu(net.norm(net.conv(x, 1)));
  x = net.relu(net.add(net.norm(net.conv(y, 3)), x, true), true);
  y = net.norm(net.conv(net.relu(net.norm(net.conv(x, 3, 2))), 1));
  x = net.relu(net.add(y, net.norm(net.conv(x, 1, 2))));
  net.returns(net.head(x));
  return net;
}

// A block of EfficientNet without its gate: silu, and a residual behind the last norm.
inline Network silu_network(int64_t channels = 4, at::ScalarType type = at::kFloat) {
  Network net({channels, 8, 8}, type);
  const auto y = net.unary("silu_.default", net.norm(net.conv("x", 3)));
  const auto z = net.unary("silu.default", net.norm(net.conv(y, 3)));
  net.returns(net.add(net.norm(net.conv(z, 1)), "x", /*in_place=*/true));
  return net;
}

/// x [batch, 2, 8, 8]: two heads of 8 tokens, and tokens of width 8. As GPT-2 of transformers, with
/// attention of x itself in place of projections.
inline Network gpt2_block(double dropout_p, at::ScalarType type = at::kFloat) {
  Network net({2, 8, 8}, type);
  const std::vector<int64_t> narrow = {-1, 2, 8, 8}, wide = {-1, 2, 8, 16};
  auto hidden = net.dropout("x", dropout_p);
  auto normed = net.layer_norm(hidden, 8);
  const auto mixed = net.unary("contiguous.default",
                               net.attend(normed, normed, normed, {{"is_causal", truth(true)}}));
  hidden = net.add(net.dropout(net.conv1d(mixed, 8, narrow), dropout_p), hidden);
  normed = net.layer_norm(hidden, 8);
  const auto active = net.composed_gelu(net.conv1d(normed, 8, wide));
  hidden = net.add(hidden, net.dropout(net.conv1d(active, 16, narrow), dropout_p));
  net.returns(net.layer_norm(hidden, 8));
  return net;
}

/// x [batch, 8, 2 * dim]: torch.nn.MultiheadAttention of eight tokens with two heads, batch_first.
/// Or x [seq, 8, 2 * dim] of eight samples.
struct MultiheadOptions {
  bool batch_first = true;
  int64_t dim = 4;  // of a head
  double dropout_p = 0;
  bool has_bias = true, reads_packed = false;
  bool copies = false;       // attention's result; an export has it where strides ask for it
  std::string branch = {};   // "sum" of a dropped result and x, or "norm" of this sum
  std::string written = {};  // "result": behind a flatten, or "input"
  std::vector<int64_t> query_rows = {};          // empty: as keys and values
  std::vector<int64_t> value_order = {0, 1, 2};  // which part is query, key and value
};
inline Network multihead_attention(const MultiheadOptions& options,
                                   at::ScalarType type = at::kFloat) {
  const auto dim = options.dim, width = 2 * dim;
  Network net({8, width}, type);
  const bool batch_first = options.batch_first;
  const auto x = options.written == "input" ? net.unary("neg.default", "x") : std::string("x");
  const auto product = net.linear_layer(batch_first ? net.transpose(x, 1, 0) : x, 3 * width, width,
                                        options.has_bias);
  const auto parts =
      net.call("unflatten.int",
               {{"self", tensor(product)}, {"dim", integer(-1)}, {"sizes", integers({3, width})}});
  const auto moved = net.transpose(net.unary_at("unsqueeze.default", parts, 0), 0, -2);
  const auto packed = net.unary("contiguous.default", net.unary_at("squeeze.dim", moved, -2));
  std::vector<std::string> heads;
  for (const auto part : options.value_order) {
    heads.push_back(net.select(packed, 0, part));
  }
  for (auto& head : heads) {
    const bool is_other = &head == heads.data() && !options.query_rows.empty();
    const std::vector<int64_t> all_rows = {batch_first ? 8 : -1, batch_first ? -1 : 16, dim};
    const auto rows = is_other ? options.query_rows : all_rows;
    head = net.transpose(net.view(head, rows), 0, 1);
  }
  for (auto& head : heads) {
    head = net.view(head, {batch_first ? -1 : 8, 2, batch_first ? 8 : -1, dim});
  }
  const auto mixed =
      net.attend(heads[0], heads[1], heads[2], {{"dropout_p", number(options.dropout_p)}});
  auto rows =
      net.call("permute.default", {{"self", tensor(mixed)}, {"dims", integers({2, 0, 1, 3})}});
  if (options.copies || options.dropout_p > 0) {
    rows = net.unary("contiguous.default", rows);
  }
  const auto out = net.linear_layer(net.view(rows, {-1, width}), width, width, options.has_bias);
  auto result = batch_first ? net.transpose(net.view(out, {8, -1, width}), 1, 0)
                            : net.view(out, {-1, 8, width});
  if (options.written == "result") {
    net.with("mul_.Tensor", net.flatten(result), 2);
  } else if (options.written == "input") {
    result = net.add(x, result, /*in_place=*/true);
  }
  if (!options.branch.empty()) {
    result = net.add(x, net.dropout(result, options.dropout_p));
    result = options.branch == "norm" ? net.layer_norm(result, width) : result;
  }
  if (options.reads_packed) {
    result = net.add(result, net.transpose(net.select(packed, 0, 2), 1, 0));
  }
  net.returns(result);
  return net;
}

/// x [batch, 8, 8]: labels of x's largest values, and logits of eight classes for each of its rows.
struct Loss {
  explicit Loss(at::ScalarType type) : net({8, 8}, type) {
    places = net.unary_at("argmax.default", "x", -1);
    labels = net.view(places, {-1});
  }
  std::string logits(bool has_bias = true) { return net.linear_layer("x", 8, 8, has_bias); }
  void returns_loss(const std::string& rows, const Inputs& options = {}) {
    Inputs arguments = {{"self", tensor(rows)}, {"target", tensor(labels)}};
    arguments.insert(arguments.end(), options.begin(), options.end());
    net.returns(net.call("cross_entropy_loss.default", arguments));
  }

  Network net;
  std::string places, labels;  // [batch, 8], [batch * 8]
};

/// As Llama's, in this dtype.
inline Network llama_block(at::ScalarType type) {
  Network net({2, 8, 8}, type);
  const auto residual = [&](const std::string& x, const std::string& wide) {
    // torch.export records the tensor that `to` returned: its input, if the dtype is the same.
    return type == at::kFloat ? wide : x;
  };
  const auto first = net.linear_layer("x", 8, 8, false);
  auto [normed, wide] = net.rms_norm(first, 8);
  const auto cos = net.statistics(at::randn({8, 8})), sin = net.statistics(at::randn({8, 8}));
  const auto turned = net.rotary(normed, cos, sin);
  const auto mixed = net.attend(turned, turned, normed, {{"is_causal", truth(true)}});
  const auto hidden = net.add(residual(first, wide), net.linear_layer(mixed, 8, 8, false));
  const auto [normed_2, wide_2] = net.rms_norm(hidden, 8);
  const auto gate = net.unary("silu.default", net.linear_layer(normed_2, 16, 8, false));
  const auto product = net.multiply(gate, net.linear_layer(normed_2, 16, 8, false));
  net.returns(net.add(residual(hidden, wide_2), net.linear_layer(product, 8, 16, false)));
  return net;
}

}  // namespace export_test
