// SPDX-License-Identifier: Apache-2.0
#include "models/lora.hpp"

#include <c10/core/InferenceMode.h>
#include <fnmatch.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "decoder_parts.hpp"
#include "linear_layers.hpp"

namespace models {
namespace {

/// Calls of refresh_fp8_base(): part of the version of all weights.
std::atomic<uint64_t> num_refreshes{0};

/// A PEFT pattern matches the last part of a layer's name or the full name.
bool matches(const std::string& pattern, const std::string& name) {
  const auto dot = name.rfind('.');
  const auto last = dot == std::string::npos ? name : name.substr(dot + 1);
  return fnmatch(pattern.c_str(), last.c_str(), 0) == 0 ||
         fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

void check(const LoraOptions& options) {
  detail::check_sizes("LoRA", {{"rank", options.rank}});
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    detail::refuse("LoRA: dropout = ", options.dropout, ": it must be at least 0 and below 1");
  }
  if (options.target_modules.empty()) {
    detail::refuse("LoRA: target_modules is empty");
  }
}

/// Draws the first values of an adapter.
void reset_adapter(torch::Tensor& lora_a, torch::Tensor& lora_b) {
  torch::nn::init::kaiming_uniform_(lora_a, std::sqrt(5.0));
  torch::nn::init::zeros_(lora_b);
}

/// Adds in float32 or wider and rounds once; a bfloat16 product would round twice.
void merge_into(torch::Tensor weight, const torch::Tensor& lora_a, const torch::Tensor& lora_b,
                double scale) {
  const torch::NoGradGuard no_grad;
  const auto wide = c10::promoteTypes(
      torch::kFloat, c10::promoteTypes(weight.scalar_type(), lora_a.scalar_type()));
  const auto change = torch::mm(lora_b.to(wide), lora_a.to(wide));
  weight.copy_(weight.to(wide).add(change, scale));
}

/// For the message about a pattern without linear layers: a module of another kind, if any.
std::string other_layer(const torch::nn::Module& module, const std::string& pattern) {
  constexpr std::string_view kWeight = ".weight";
  for (const auto& name : module.named_parameters().keys()) {
    const auto layer = name.ends_with(kWeight) ? name.substr(0, name.size() - kWeight.size()) : "";
    if (!layer.empty() && matches(pattern, layer)) {
      return ddp::concat("; ", layer, " has a weight, but is not a linear layer");
    }
  }
  return "";
}

/// The linear layers, the first ones of many; layers that differ in their numbers once.
std::string list_layers(const torch::nn::Module& module) {
  constexpr std::size_t kShown = 12;
  std::vector<std::string> names;
  for (const auto& layer : detail::linear_layers(module)) {
    const auto name = layer.name.substr(layer.name.rfind('.') + 1);  // the same in each block
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      names.push_back(name);
    }
  }
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  return names.empty() ? "; it has none"
                       : ddp::concat("; its linear layers end in: ", text,
                                     names.size() > kShown ? ", …" : "");
}

/// Names of the layers that get adapters.
std::set<std::string> chosen_layers(const torch::nn::Module& module, const LoraOptions& options) {
  std::vector<bool> used(options.target_modules.size(), false);
  std::set<std::string> chosen;
  for (const auto& layer : detail::linear_layers(module)) {
    for (std::size_t i = 0; i < used.size(); ++i) {
      if (matches(options.target_modules[i], layer.name)) {
        used[i] = true;
        chosen.insert(layer.name);
      }
    }
    if (chosen.count(layer.name) != 0 && layer.lora_a.defined()) {
      detail::refuse("LoRA: the layer ", layer.name, " already has an adapter");
    }
  }
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) {
      const auto& pattern = options.target_modules[i];
      detail::refuse("LoRA: the target module \"", pattern,
                     "\" matches no linear layer of this model", other_layer(module, pattern),
                     list_layers(module));
    }
  }
  return chosen;
}

/// Returns the chosen layers of the owner with new adapters.
std::vector<ddp::ops::LinearLayer> with_adapters(const ddp::ops::LinearOwner& owner,
                                                 const std::string& prefix,
                                                 const std::set<std::string>& chosen,
                                                 const LoraOptions& options) {
  std::vector<ddp::ops::LinearLayer> layers;
  for (auto& layer : owner.linears()) {
    if (chosen.count(prefix + layer.name) == 0) {
      continue;
    }
    const auto memory = layer.weight.options().dtype(options.dtype).requires_grad(true);
    layer.lora_a = torch::empty({options.rank, layer.weight.size(1)}, memory);
    layer.lora_b = torch::empty({layer.weight.size(0), options.rank}, memory);
    reset_adapter(layer.lora_a, layer.lora_b);
    layer.lora_alpha = options.alpha;
    layer.lora_dropout = options.dropout;
    layers.push_back(std::move(layer));
  }
  return layers;
}

void merge_owner(ddp::ops::LinearOwner& owner) {
  const auto layers = owner.linears();
  const auto adapted = [](const auto& layer) { return layer.lora_a.defined(); };
  if (std::none_of(layers.begin(), layers.end(), adapted)) {
    return;
  }
  for (const auto& layer : layers) {
    if (adapted(layer) && layer.shares_weight) {
      detail::refuse("LoRA: the adapter of ", layer.name, " cannot be merged, because other ",
                     "operators read its weight too, such as a tied embedding; fix: save the "
                     "adapter");
    }
  }
  for (const auto& layer : layers) {
    if (adapted(layer)) {
      merge_into(layer.weight, layer.lora_a, layer.lora_b,
                 layer.lora_alpha / static_cast<double>(layer.lora_a.size(0)));
    }
  }
  owner.remove_adapters();
}

}  // namespace

namespace detail {

class Fp8Copy::Current : public ddp::ops::WeightCopy {
 public:
  const ddp::ops::Fp8Weight& of(torch::TensorList weights, const std::string& layer) {
    const auto is_same = [](const auto& a, const auto& b) { return a.is_same(b); };
    if (!std::equal(weights.begin(), weights.end(), weights_.begin(), weights_.end(), is_same)) {
      weights_ = weights.vec();
      layer_ = layer;
      sources_.clear();
    }
    refresh();
    return *copy_;
  }

  void refresh() override {
    std::vector<Source> sources;
    for (const auto& weight : weights_) {
      const auto& version = weight.unsafeGetTensorImpl()->version_counter();
      sources.push_back({.num_refreshes = num_refreshes,
                         .version = version.enabled() ? version.current_version() : 0,
                         .data = weight.const_data_ptr(),
                         .storage = weight.storage().getWeakStorageImpl()});
    }
    if (!copy_ || sources != sources_) {
      convert();
      sources_ = std::move(sources);
    }
  }

 private:
  /// What a weight was when it was converted.
  struct Source {
    uint64_t num_refreshes;
    uint32_t version;
    const void* data;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // no other storage gets its address

    bool operator==(const Source&) const = default;
  };

  void convert() {
    const c10::InferenceMode normal(false);  // a backward may read the copy later
    const torch::NoGradGuard no_grad;
    auto copy = ddp::ops::quantize_weight(ddp::ops::joined_rows(weights_));
    if (!copy.scales.isfinite().all().item<bool>()) {
      throw std::runtime_error("FP8: the frozen weight of " + layer_ +
                               " holds infinite or NaN values, which no scale represents; check "
                               "the base's files");
    }
    if (!copy_) {
      copy_ = std::move(copy);
    } else if (copy_->values.sizes() == copy.values.sizes() &&
               copy_->values.device() == copy.values.device()) {
      // In place: CUDA graphs hold the memory.
      copy_->values.copy_(copy.values);
      copy_->scales.copy_(copy.scales);
      copy_->transposed_values.copy_(copy.transposed_values);
      copy_->transposed_scales.copy_(copy.transposed_scales);
    } else {
      copy_ = std::move(copy);
      ddp::ops::invalidate_graphs();
    }
  }

  std::vector<torch::Tensor> weights_;
  std::string layer_;
  std::optional<ddp::ops::Fp8Weight> copy_;
  std::vector<Source> sources_;  // empty: other weights than those that were converted
};

const ddp::ops::Fp8Weight& Fp8Copy::of(torch::TensorList weights, const std::string& layer) {
  if (current_ == nullptr) {
    const auto made = std::make_shared<Current>();
    made->of(weights, layer);  // if it throws, there is no copy to refresh
    ddp::ops::register_weight_copy(made);
    current_ = made;
  }
  return current_->of(weights, layer);
}

}  // namespace detail

LinearImpl::LinearImpl(int64_t in_features, int64_t out_features, bool with_bias,
                       const torch::TensorOptions& tensor_options) {
  weight = detail::new_parameter(*this, "weight", {out_features, in_features}, tensor_options);
  if (with_bias) {
    bias = detail::new_parameter(*this, "bias", {out_features}, tensor_options);
  }
}

torch::Tensor LinearImpl::forward(const torch::Tensor& input) {
  return forward_add(input, {});
}

torch::Tensor LinearImpl::forward_add(const torch::Tensor& input, const torch::Tensor& residual,
                                      bool skips_result) {
  if (!has_lora()) {
    return ddp::ops::linear(input, weight,
                            {.bias = bias, .residual = residual, .skips_result = skips_result});
  }
  auto options = lora_call();
  options.bias = bias;
  options.residual = residual;
  options.skips_result = skips_result;
  if (fp8_base_) {
    options.fp8 = fp8_.of(weight, name_);
  }
  return ddp::ops::lora_linear(input, weight, lora_a, lora_b, std::move(options));
}

ddp::ops::LoraLinearOptions LinearImpl::lora_call() const {
  return {.scale = lora_scale_, .dropout_p = is_training() ? lora_dropout_ : 0.0};
}

void LinearImpl::add_lora(const LoraOptions& options, const std::string& name) {
  check(options);
  if (has_lora()) {
    detail::refuse("LoRA: this layer already has an adapter");
  }
  weight.requires_grad_(false);
  if (bias.defined()) {
    bias.requires_grad_(false);
  }
  const auto memory = weight.options().dtype(options.dtype);
  const auto add = [&](const char* matrix, torch::IntArrayRef shape) {
    auto group = register_module(matrix, std::make_shared<detail::Group>());
    return detail::new_parameter(*group, "weight", shape, memory);
  };
  lora_a = add("lora_A", {options.rank, weight.size(1)});
  lora_b = add("lora_B", {weight.size(0), options.rank});
  reset_adapter(lora_a, lora_b);
  lora_alpha_ = options.alpha;
  lora_scale_ = options.alpha / static_cast<double>(options.rank);
  lora_dropout_ = options.dropout;
  fp8_base_ = options.fp8_base;
  name_ = name;
  ddp::ops::invalidate_graphs();
}

void LinearImpl::merge_lora() {
  if (!has_lora()) {
    return;
  }
  merge_into(weight, lora_a, lora_b, lora_scale_);
  unregister_module("lora_A");
  unregister_module("lora_B");
  lora_a = torch::Tensor();
  lora_b = torch::Tensor();
  fp8_ = {};
  ddp::ops::invalidate_graphs();
}

JoinedLinears::JoinedLinears(std::vector<Linear> layers) : layers_(std::move(layers)) {
  join();  // before buckets and optimizers know the memory
}

void JoinedLinears::join() const {
  std::vector<torch::Tensor> weights, biases;
  for (const auto& layer : layers_) {
    weights.push_back(layer->weight);
    if (layer->bias.defined()) {
      biases.push_back(layer->bias);
    }
  }
  ddp::ops::join_rows(weights);
  if (!biases.empty()) {
    ddp::ops::join_rows(biases);
  }
}

torch::Tensor JoinedLinears::compute(const torch::Tensor& input, bool gated) const {
  const auto activated = [gated](const torch::Tensor& results) {
    return gated ? ddp::ops::swiglu(results) : results;
  };
  const auto& first = *layers_.front();
  std::vector<torch::Tensor> weights, biases, as, bs, results;
  std::vector<int64_t> out_sizes;
  bool have_adapters = true, have_none = true;
  for (const auto& layer : layers_) {
    const bool equals_first = layer->has_lora() && first.has_lora() &&
                              layer->lora_a.sizes() == first.lora_a.sizes() &&
                              layer->lora_a.dtype() == first.lora_a.dtype() &&
                              layer->lora_call().scale == first.lora_call().scale &&
                              layer->lora_call().dropout_p == first.lora_call().dropout_p &&
                              layer->has_fp8_base() == first.has_fp8_base();
    have_adapters = have_adapters && equals_first;
    have_none = have_none && !layer->has_lora();
    weights.push_back(layer->weight);
    out_sizes.push_back(layer->weight.size(0));
    if (layer->bias.defined()) {
      biases.push_back(layer->bias);
    }
    as.push_back(layer->lora_a);
    bs.push_back(layer->lora_b);
  }
  const bool have_biases = biases.empty() || biases.size() == layers_.size();
  if (!have_biases || (!have_adapters && !have_none)) {
    for (auto layer : layers_) {
      results.push_back(layer->forward(input));
    }
    return activated(torch::cat(results, -1));
  }
  const auto bias = biases.empty() ? torch::Tensor() : ddp::ops::joined_rows(biases);
  const auto weight = ddp::ops::joined_rows(weights);
  if (have_none) {
    fp8_ = {};  // of merged adapters
    return activated(ddp::ops::linear(input, weight, {.bias = bias}));
  }
  auto options = first.lora_call();
  options.bias = bias;
  options.out_sizes = out_sizes;
  options.gated = gated;
  if (first.has_fp8_base()) {
    options.fp8 = fp8_.of(weights, first.name());
  }
  return ddp::ops::lora_linear(input, weight, ddp::ops::joined_rows(as), ddp::ops::joined_rows(bs),
                               std::move(options));
}

void refresh_fp8_base() {
  ++num_refreshes;
}

LoraSummary add_lora(torch::nn::Module& module, const LoraOptions& options) {
  check(options);
  const auto chosen = chosen_layers(module, options);
  LoraSummary summary;
  const auto refuse_fp8 = [&](const ddp::ops::LinearOwner& owner, const std::string& prefix) {
    for (const auto& layer : owner.linears()) {
      if (chosen.count(prefix + layer.name) != 0) {
        detail::refuse("LoRA: fp8_base needs models::Linear, and ", prefix, layer.name,
                       " is a layer of an exported program; fix: fp8_base = false");
      }
    }
  };
  if (options.fp8_base) {
    detail::visit_linears(
        module, [](const LinearImpl&, const std::string&) {}, refuse_fp8);
  }
  for (auto& parameter : module.parameters()) {
    parameter.requires_grad_(false);
  }
  detail::visit_linears(
      module,
      [&](LinearImpl& linear, const std::string& name) {
        if (chosen.count(name) != 0) {
          linear.add_lora(options, name);
          summary.layers.push_back(name);
        }
      },
      [&](ddp::ops::LinearOwner& owner, const std::string& prefix) {
        const auto layers = with_adapters(owner, prefix, chosen, options);
        if (!layers.empty()) {
          owner.add_adapters(layers);
        }
        for (const auto& layer : layers) {
          summary.layers.push_back(prefix + layer.name);
        }
      });
  for (const auto& parameter : module.parameters()) {
    (parameter.requires_grad() ? summary.num_trainable : summary.num_frozen) += parameter.numel();
  }
  return summary;
}

void merge_lora(torch::nn::Module& module) {
  detail::visit_linears(
      module, [](LinearImpl& linear, const std::string&) { linear.merge_lora(); },
      [](ddp::ops::LinearOwner& owner, const std::string&) { merge_owner(owner); });
}

}  // namespace models
