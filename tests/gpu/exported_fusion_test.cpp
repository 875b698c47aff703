// SPDX-License-Identifier: Apache-2.0
// Exported programs with the ops' kernels in place of LibTorch's operators: both beside the program
// in float64. A fused one may be at most twice as far from it.
#include "unit/export/fused_network.hpp"
#include "unit/export/gated_network.hpp"

using namespace export_test;

namespace {

double distance(const at::Tensor& tensor, const at::Tensor& exact) {
  const auto reference = exact.to(at::kDouble).cpu();
  const auto norm = reference.norm().item<double>();
  const auto difference = (tensor.to(at::kDouble).cpu() - reference).norm().item<double>();
  return norm > 0 ? difference / norm : difference;
}

void check_near(const Network& net, const Network& exact, const at::Tensor& x, bool autocasts,
                const Counts& chains, double half_rounding = 4e-3) {
  CHECK(fused(net) == chains);
  const auto format = x.suggest_memory_format();
  const auto reference = train(exact, x, {});
  const auto plain = train(net, x, {.device = at::kCUDA, .autocasts = autocasts, .format = format});
  const auto replaced =
      train(net, x, {.fuse = true, .device = at::kCUDA, .autocasts = autocasts, .format = format});
  const double rounding = net.type == at::kFloat && !autocasts ? 1e-6 : half_rounding;
  REQUIRE(replaced.size() == plain.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    INFO("tensor " << i << " of " << plain.size());
    CHECK(replaced[i].scalar_type() == plain[i].scalar_type());
    CHECK(distance(replaced[i], reference[i]) <= 2 * distance(plain[i], reference[i]) + rounding);
  }
}

const Counts kGpt2 = {{"layer_norm", 1}, {"attention", 1}, {"add_layer_norm", 2}, {"gelu", 1}};

}  // namespace

TEST_CASE("a fused residual network", "[gpu][export]") {
  const bool autocasts = GENERATE(false, true);
  // Channels last, as the kernels want them.
  check_near(residual_network(16), residual_network(16, at::kDouble),
             images(16).contiguous(at::MemoryFormat::ChannelsLast), autocasts,
             {{"conv2d", 6},
              {"batch_norm_relu_max_pool", 1},
              {"batch_norm_relu", 2},
              {"batch_norm_add_relu", 2},
              {"pooled_linear", 1}});
}

TEST_CASE("a fused network with silu", "[gpu][export]") {
  const bool autocasts = GENERATE(false, true);
  check_near(silu_network(16), silu_network(16, at::kDouble),
             images(16).contiguous(at::MemoryFormat::ChannelsLast), autocasts,
             {{"conv2d", 3}, {"batch_norm_silu", 2}, {"batch_norm", 1}});
}

TEST_CASE("fused squeeze and excitation", "[gpu][export]") {
  const auto form = GENERATE(GateForm{}, timm_gate(), GateForm{.gate = "hardsigmoid.default"});
  const bool autocasts = GENERATE(false, true);
  const auto type = autocasts ? at::kFloat : GENERATE(at::kFloat, at::kBFloat16);
  check_near(gated_network(form, 16, type), gated_network(form, 16, at::kDouble),
             images(16).contiguous(at::MemoryFormat::ChannelsLast), autocasts,
             {{"channel_means", 2},
              {"scale_channels", 2},
              {"batch_norm_silu", 2},
              {"batch_norm", 2},
              {"conv2d", 8}});
}

TEST_CASE("a fused block of GPT-2", "[gpu][export]") {
  const auto type = GENERATE(at::kFloat, at::kBFloat16, at::kDouble);
  check_near(gpt2_block(0, type), gpt2_block(0, at::kDouble), tokens(), false, kGpt2);
}

TEST_CASE("a fused block of GPT-2 under autocast", "[gpu][export]") {
  check_near(gpt2_block(0), gpt2_block(0, at::kDouble), tokens(), true, kGpt2);
}

TEST_CASE("a fused block of GPT-2 with dropout", "[gpu][export]") {
  const auto type = GENERATE(at::kFloat, at::kBFloat16);
  const auto net = gpt2_block(0.5, type);
  auto chains = kGpt2;
  chains["dropout"] = 1;
  CHECK(fused(net) == chains);
  const Run run{.fuse = true, .device = at::kCUDA};
  const auto first = train(net, tokens(), run), second = train(net, tokens(), run);
  for (std::size_t i = 0; i < first.size(); ++i) {
    CHECK(first[i].isfinite().all().item<bool>());
    CHECK(at::equal(first[i], second[i]));  // the backward draws what the forward drew
  }
}

TEST_CASE("a fused block of Llama", "[gpu][export]") {
  const auto type = GENERATE(at::kFloat, at::kBFloat16);
  check_near(llama_block(type), llama_block(at::kDouble), tokens(), false,
             {{"rms_norm", 2},
              {"apply_rotary", 1},
              {"attention", 1},
              {"add_branch", 2},
              {"swiglu", 1},
              {"linear", 3}});
}

TEST_CASE("a fused multi-head attention", "[gpu][export]") {
  MultiheadOptions options;
  options.dim = GENERATE(4, 16);
  options.has_bias = GENERATE(true, false);
  options.copies = true;
  options.batch_first = GENERATE(true, false);
  options.branch = GENERATE("", "norm");
  Counts chains = {{"multihead_attention", 1}};
  if (!options.branch.empty()) {
    chains["add_layer_norm"] = 1;
  }
  const bool autocasts = GENERATE(false, true);
  const auto type = autocasts ? at::kFloat : GENERATE(at::kFloat, at::kBFloat16);
  at::manual_seed(2);
  const auto x = at::randn({3, 8, 2 * options.dim});
  check_near(multihead_attention(options, type), multihead_attention(options, at::kDouble), x,
             autocasts, chains);
}

TEST_CASE("a fused loss behind a linear layer", "[gpu][export]") {
  const bool autocasts = GENERATE(false, true);
  const auto type = autocasts ? at::kFloat : GENERATE(at::kFloat, at::kBFloat16);
  const bool is_float = GENERATE(false, true);
  const Inputs options = {{"reduction", integer(GENERATE(at::Reduction::Mean, at::Reduction::Sum))},
                          {"ignore_index", integer(3)},
                          {"label_smoothing", number(GENERATE(0.0, 0.1))}};
  const auto network = [&](at::ScalarType dtype) {
    Loss loss(dtype);
    const auto logits = loss.net.view(loss.logits(), {-1, 8});
    loss.returns_loss(is_float ? loss.net.to(logits, at::kFloat) : logits, options);
    return loss.net;
  };
  // Rounded first, so that the labels are the same in each dtype.
  // The gradients of few rows cancel each other.
  check_near(network(type), network(at::kDouble), sequences().to(at::kBFloat16).to(at::kFloat),
             autocasts, {{"linear_cross_entropy", 1}}, /*half_rounding=*/3e-2);
}

TEST_CASE("fused patches of images", "[gpu][export]") {
  const auto patch = GENERATE(2, 4);
  const bool autocasts = GENERATE(false, true);
  const auto type = autocasts ? at::kFloat : GENERATE(at::kFloat, at::kBFloat16);
  const auto network = [&](at::ScalarType dtype) {
    Network net({3, 8, 8}, dtype);
    return net.returns(net.patches("x", patch));
  };
  const auto format = GENERATE(at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast);
  check_near(network(type), network(at::kDouble), images(3).contiguous(format), autocasts,
             {{"conv2d", 1}});
}

TEST_CASE("views around checkpointed blocks of a fused network in bf16", "[gpu][export]") {
  Network net({16, 8, 8}, at::kBFloat16);
  const auto y = net.relu(net.norm(net.conv("x", 3)));
  net.module("block");
  net.returns(net.linear_layer(net.view(y, {-1, 16 * 64}), 3, 16 * 64, true));
  CHECK(fused(net, {"block"}) == Counts{{"conv2d", 1}, {"batch_norm_relu", 1}, {"linear", 1}});
  const auto run = [&](std::vector<std::string> blocks) {
    return train(net, images(16),
                 {.fuse = true, .checkpoint_blocks = std::move(blocks), .device = at::kCUDA});
  };
  const auto kept = run({}), computed_again = run({"block"});
  REQUIRE(kept.size() == computed_again.size());
  for (std::size_t i = 0; i < kept.size(); ++i) {
    CHECK(distance(computed_again[i], kept[i]) <= 4e-3);
  }
}

TEST_CASE("fused merging of patches", "[gpu][export]") {
  PatchMerging merging;
  merging.first_fastest = GENERATE(true, false);
  if (GENERATE(true, false)) {
    std::swap(merging.first, merging.second);
  }
  const auto type = GENERATE(at::kFloat, at::kBFloat16);
  at::manual_seed(2);
  check_near(merged_patches(merging, type), merged_patches(merging, at::kDouble),
             at::randn({3, 8, 8, 8}), false, {{"linear", 1}, {"space_to_depth", 1}});
}
