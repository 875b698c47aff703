// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

namespace models::detail {

/// Finds one of an owner's norms by name.
template <typename NormType, std::size_t N>
NormType& select_norm(const std::string& name,
                      const std::array<std::pair<const char*, NormType*>, N>& norms) {
  for (const auto& [candidate, norm] : norms) {
    if (name == candidate) {
      return *norm;
    }
  }
  throw std::invalid_argument("there is no normalisation layer called \"" + name + "\"");
}

}  // namespace models::detail
