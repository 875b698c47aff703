// SPDX-License-Identifier: Apache-2.0
#include "export/module_tree.hpp"

#include <algorithm>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

constexpr std::size_t kMaxModuleDepth = 100;

// A module of Python, with its children in Python's order.
struct Place {
  using Children = std::list<Place>;

  std::string name;
  std::vector<NamedTensor> parameters, buffers;  // by their last names
  Children children;
  std::map<std::string, Children::iterator> by_name;

  // A new child comes before `next`, which is behind the last child that the same list named.
  Place& child(const std::string& child_name, Children::iterator& next) {
    const auto [known, is_new] = by_name.emplace(child_name, next);
    if (is_new) {
      known->second = children.emplace(next);
      known->second->name = child_name;
    }
    next = std::next(known->second);
    return *known->second;
  }
};

std::vector<std::string> parts_of(const std::string& name) {
  std::vector<std::string> parts;
  for (std::size_t start = 0; start <= name.size();) {
    const auto end = std::min(name.find('.', start), name.size());
    parts.push_back(name.substr(start, end - start));
    start = end + 1;
  }
  const bool is_valid =
      parts.size() <= kMaxModuleDepth &&
      std::none_of(parts.begin(), parts.end(), [](const auto& part) { return part.empty(); });
  if (!is_valid) {
    throw DataError("a tensor has the name '" + printable(name.substr(0, 200)) + "'");
  }
  return parts;
}

void add(Place& root, const std::vector<NamedTensor>& list, std::vector<NamedTensor> Place::*kind) {
  std::map<const Place*, Place::Children::iterator> positions;  // behind the last named child
  for (const auto& [name, tensor] : list) {
    const auto parts = parts_of(name);
    Place* place = &root;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      auto& next = positions.try_emplace(place, place->children.begin()).first->second;
      place = &place->child(parts[i], next);
    }
    (place->*kind).push_back({parts.back(), tensor});
  }
}

void register_place(torch::nn::Module& module, const Place& place);

void register_children(torch::nn::Module& module, const Place& place) {
  for (const auto& child : place.children) {
    const auto submodule = std::make_shared<torch::nn::Module>(child.name);
    register_place(*submodule, child);
    module.register_module(child.name, submodule);
  }
}

void register_place(torch::nn::Module& module, const Place& place) {
  for (const auto& [name, tensor] : place.parameters) {
    module.register_parameter(name, tensor, tensor.requires_grad());
  }
  for (const auto& [name, tensor] : place.buffers) {
    module.register_buffer(name, tensor);
  }
  register_children(module, place);
}

Place tree_of(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers) {
  Place tree;
  add(tree, parameters, &Place::parameters);
  add(tree, buffers, &Place::buffers);
  return tree;
}

}  // namespace

void register_tree(torch::nn::Module& root, const std::vector<NamedTensor>& parameters,
                   const std::vector<NamedTensor>& buffers) {
  register_place(root, tree_of(parameters, buffers));
}

void replace_children(torch::nn::Module& root, const std::vector<NamedTensor>& parameters,
                      const std::vector<NamedTensor>& buffers) {
  const auto tree = tree_of(parameters, buffers);
  for (const auto& child : root.named_children().keys()) {
    root.unregister_module(child);
  }
  register_children(root, tree);
}

}  // namespace ddp::detail
