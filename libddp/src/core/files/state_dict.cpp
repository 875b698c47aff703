// SPDX-License-Identifier: Apache-2.0
#include "ddp/core/state_dict.hpp"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <ostream>
#include <string_view>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"

namespace ddp {
namespace {

constexpr std::string_view kSlotPrefix = "state.";

at::Tensor flat(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1}, dense.storage_offset());
}

int64_t numel_of(const StateSlice& slice) {
  return std::accumulate(slice.sizes.begin(), slice.sizes.end(), int64_t{1}, std::multiplies<>());
}

// Calls visit(part, first, last) for runs of elements that together are [begin, end): each is in
// its part.
template <typename Visit>
void visit_runs(const std::vector<StatePart>& parts, const StateKey& key, int64_t begin,
                int64_t end, const Visit& visit) {
  std::vector<const StatePart*> in_order;
  for (const auto& part : parts) {
    in_order.push_back(&part);
  }
  std::sort(in_order.begin(), in_order.end(),
            [](const auto* a, const auto* b) { return a->slice.begin < b->slice.begin; });
  int64_t next = begin;
  for (const auto* part : in_order) {
    const int64_t last = std::min(end, part->slice.begin + part->tensor.numel());
    if (part->slice.begin <= next && last > next) {
      visit(*part, next, last);
      next = last;
    }
  }
  if (next < end) {
    throw MismatchError(concat("the parts of ", key.text(), " lack its element ", next,
                               ": they are of one rank only; fix: load the parts of all ranks"));
  }
}

// Copies the elements of `parts` from `begin` on to `to`, which is 1-D.
void read_parts(const std::vector<StatePart>& parts, const StateKey& key, int64_t begin,
                const at::Tensor& to) {
  visit_runs(parts, key, begin, begin + to.numel(),
             [&](const StatePart& part, int64_t first, int64_t last) {
               to.narrow(0, first - begin, last - first)
                   .copy_(part.tensor.narrow(0, first - part.slice.begin, last - first));
             });
}

bool has_order(const StateSlice& slice, const at::Tensor& like) {
  for (int64_t dim = 0; dim < like.dim(); ++dim) {
    const auto i = static_cast<size_t>(dim);
    if (slice.sizes[i] != 1 && slice.strides[i] != like.stride(dim)) {
      return false;
    }
  }
  return true;
}

}  // namespace

StateKey::StateKey(const std::string& text) : parameter(text) {
  const auto dot = text.rfind('.');
  if (text.starts_with(kSlotPrefix) && dot > kSlotPrefix.size() && dot + 1 < text.size()) {
    parameter = text.substr(kSlotPrefix.size(), dot - kSlotPrefix.size());
    slot = text.substr(dot + 1);
  }
}

StateKey::StateKey(std::string parameter_name, std::string slot_name)
    : parameter(std::move(parameter_name)), slot(std::move(slot_name)) {
  DDP_CHECK(slot.find('.') == std::string::npos, "a slot's name has no dot");
}

std::string StateKey::text() const {
  return slot.empty() ? parameter : concat(kSlotPrefix, parameter, '.', slot);
}

std::ostream& operator<<(std::ostream& stream, const StateKey& key) {
  return stream << key.text();
}

at::IntArrayRef StateDict::sizes(const StateKey& key) const {
  const auto found = tensors.find(key);
  return found != tensors.end() ? found->second.sizes()
                                : at::IntArrayRef(parts.at(key).front().slice.sizes);
}

void StateDict::require_all_parts(const StateKey& key) const {
  if (const auto found = parts.find(key); found != parts.end()) {
    visit_runs(found->second, key, 0, numel_of(found->second.front().slice),
               [](const StatePart&, int64_t, int64_t) {});
  }
}

at::Tensor StateDict::whole(const StateKey& key) const {
  if (const auto found = tensors.find(key); found != tensors.end()) {
    return found->second;
  }
  const at::NoGradGuard no_grad;
  const auto& divided = parts.at(key);
  const auto& slice = divided.front().slice;
  const auto joined = at::empty_strided(slice.sizes, slice.strides,
                                        divided.front().tensor.options().device(at::kCPU));
  read_parts(divided, key, 0, flat(joined));
  return joined;
}

at::Tensor StateDict::slice(const StateKey& key, const at::Tensor& like, int64_t begin,
                            int64_t numel) const {
  const at::NoGradGuard no_grad;
  const auto divided = parts.find(key);
  if (divided != parts.end() && has_order(divided->second.front().slice, like)) {
    const auto elements = at::empty({numel}, divided->second.front().tensor.options());
    read_parts(divided->second, key, begin, elements);
    return elements;
  }
  const auto all = whole(key);
  const auto ordered = at::empty_strided(like.sizes(), like.strides(), all.options());
  ordered.copy_(all);
  return flat(ordered).narrow(0, begin, numel);
}

}  // namespace ddp
