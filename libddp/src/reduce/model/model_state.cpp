// SPDX-License-Identifier: Apache-2.0
#include "reduce/model/model_state.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <set>
#include <utility>

#include "ddp/core/error.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ddp {
namespace {

constexpr int64_t kPieceBytes = int64_t{64} << 20;

void add_values(XXH3_state_t& hash, const at::Tensor& tensor) {
  const auto flat = tensor.detach().contiguous().view({-1});
  const int64_t piece = std::max<int64_t>(1, kPieceBytes / flat.element_size());
  for (int64_t begin = 0; begin < flat.numel(); begin += piece) {
    const auto values = flat.narrow(0, begin, std::min(piece, flat.numel() - begin)).cpu();
    XXH3_64bits_update(&hash, values.const_data_ptr(), values.nbytes());
  }
}

}  // namespace

std::string fingerprint_of(const NamedParameters& parameters) {
  const at::NoGradGuard no_grad;
  XXH3_state_t hash;
  XXH3_64bits_reset(&hash);
  for (const auto& [name, tensor] : parameters) {
    const auto about =
        concat(name, ' ', at::toString(tensor.scalar_type()), ' ', tensor.sizes(), '\n');
    XXH3_64bits_update(&hash, about.data(), about.size());
    add_values(hash, tensor);
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx",
                static_cast<unsigned long long>(XXH3_64bits_digest(&hash)));
  return text;
}

namespace detail {
namespace {

constexpr const char* kFrozenKey = "frozen_parameters";

// A parameter that was registered, or made anew, after the model was wrapped.
void require_known(const NamedParameters& known, const NamedParameters& now) {
  for (const auto& late : now) {
    if (std::none_of(known.begin(), known.end(),
                     [&](const auto& entry) { return entry.tensor.is_same(late.tensor); })) {
      throw MismatchError(concat("parameter ", late.name,
                                 " was registered after the model was wrapped, so its gradient is ",
                                 "not averaged and no checkpoint holds it; fix: register it before "
                                 "DistributedDataParallel is made, or wrap the model again"));
    }
  }
}

void require_saved(const StateDict& state, const NamedParameter& target) {
  const auto found = state.tensors.find(target.name);
  if (found == state.tensors.end()) {
    throw MismatchError(concat("the saved model has no ", target.name,
                               ": it is another model. To start a grown model from it, call ",
                               "load_weights with strict=false on its safetensors file"));
  }
  if (found->second.sizes() != target.tensor.sizes()) {
    throw MismatchError(concat(target.name, " is saved with shape ", found->second.sizes(),
                               " but has shape ", target.tensor.sizes(),
                               " here: it is another model"));
  }
}

}  // namespace

ModelState::ModelState(ModelTensors tensors, std::vector<std::string> ignored, bool has_peers)
    : tensors_(std::move(tensors)), ignored_(std::move(ignored)), has_peers_(has_peers) {
  for (const auto& [name, tensor] : tensors_.parameters) {
    if (!tensor.requires_grad()) {
      frozen_.insert(name);
    }
  }
}

NamedParameters ModelState::saved_tensors() const {
  auto tensors = tensors_.parameters;
  if (!holds_frozen_) {
    std::erase_if(tensors, [this](const auto& entry) { return is_frozen(entry); });
  }
  const auto buffers = tensors_.read_buffers ? tensors_.read_buffers() : tensors_.buffers;
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  return tensors;
}

std::string ModelState::compute_frozen_fingerprint() const {
  auto frozen = tensors_.parameters;
  std::erase_if(frozen, [this](const auto& entry) { return !is_frozen(entry); });
  return fingerprint_of(frozen);
}

const std::string& ModelState::frozen_fingerprint() const {
  if (frozen_fingerprint_.empty()) {
    frozen_fingerprint_ = compute_frozen_fingerprint();
  }
  return frozen_fingerprint_;
}

bool ModelState::is_ignored(const std::string& name) const {
  return std::find(ignored_.begin(), ignored_.end(), name) != ignored_.end();
}

StateDict ModelState::save() const {
  if (tensors_.read_parameters) {
    require_known(tensors_.parameters, tensors_.read_parameters());
  }
  StateDict state;
  if (!holds_frozen_) {
    state.values[kFrozenKey] = frozen_fingerprint();
  }
  for (const auto& [name, tensor] : saved_tensors()) {
    state.tensors.emplace(name, tensor.detach());
    if (is_ignored(name) && has_peers_) {
      state.tensors.emplace(kRankLocalPrefix + name, tensor.detach());
    }
  }
  return state;
}

void ModelState::require_same_frozen(const StateDict& state) const {
  const auto found = state.values.find(kFrozenKey);
  const auto* saved =
      found != state.values.end() ? std::get_if<std::string>(&found->second) : nullptr;
  if (saved == nullptr) {
    throw MismatchError(
        "it has the whole model, but this program saves only trained parameters "
        "(leave_frozen_out_of_state)");
  }
  if (*saved != frozen_fingerprint()) {
    throw MismatchError(concat("it was trained over another base: frozen parameters ", *saved,
                               ", here ", frozen_fingerprint()));
  }
}

void ModelState::load(const StateDict& state) {
  if (!holds_frozen_) {
    require_same_frozen(state);
  }
  auto targets = saved_tensors();
  std::set<std::string> expected;
  for (const auto& target : targets) {
    require_saved(state, target);
    expected.insert({target.name, kRankLocalPrefix + target.name});
  }
  for (const auto& [key, tensor] : state.tensors) {
    if (!expected.contains(key.text())) {
      throw MismatchError("the saved model has " + key.text() +
                          ", which this model does not have: it is another model");
    }
  }
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : targets) {
    const auto own =
        is_ignored(name) ? state.tensors.find(kRankLocalPrefix + name) : state.tensors.end();
    tensor.copy_(own != state.tensors.end() ? own->second : state.tensors.at(name));
  }
}

}  // namespace detail
}  // namespace ddp
