// SPDX-License-Identifier: Apache-2.0
#include "common/best_evaluation.hpp"

#include <cinttypes>
#include <cstdio>

namespace examples {
namespace {

constexpr const char* kBestText = "best_evaluation";

}  // namespace

void BestEvaluation::restore() {
  const auto text = checkpointer_.text(kBestText);
  int64_t steps_done = 0;
  double loss = 0;
  if (std::sscanf(text.c_str(), "%" SCNd64 " %la", &steps_done, &loss) == 2) {
    steps_done_ = steps_done;
    loss_ = loss;
  }
}

bool BestEvaluation::note(int64_t steps_done, double loss) {
  if (!(loss < loss_)) {
    return false;
  }
  steps_done_ = steps_done;
  loss_ = loss;
  char text[64];
  std::snprintf(text, sizeof text, "%" PRId64 " %a", steps_done, loss);  // %a keeps every bit
  checkpointer_.set_text(kBestText, text);
  return true;
}

}  // namespace examples
