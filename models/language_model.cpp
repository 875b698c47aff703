// SPDX-License-Identifier: Apache-2.0
#include "models/language_model.hpp"

#include <torch/torch.h>

namespace models {

double LanguageModel::matrix_flops_per_token() const {
  double flops = 0;
  for (const auto& item : named_parameters()) {
    if (item.value().dim() == 2 && is_matrix_product(item.key())) {
      flops +=
          (item.value().requires_grad() ? 6.0 : 4.0) * static_cast<double>(item.value().numel());
    }
  }
  return flops;
}

}  // namespace models
