// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/model_summary.hpp"

#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

TEST_CASE("a summary has a line for each module, its frozen parameters, and the sums") {
  torch::nn::Sequential module(torch::nn::Linear(1000, 2), torch::nn::BatchNorm1d(2),
                               torch::nn::Linear(2, 3));
  module->to(context().device());
  DistributedDataParallel model(module, group());
  module->parameters()[0].set_requires_grad(false);
  for (auto& parameter : module[1]->parameters()) {
    parameter.set_requires_grad(false);
  }
  const auto text = model_summary(model);
  CHECK(text ==
        "0  weight [2, 1000], bias [2]  Float            2,002  partly frozen\n"
        "1  weight [2], bias [2]        Float                4  frozen\n"
        "2  weight [3, 2], bias [3]     Float                9\n"
        "2,015 parameters, 11 of them trained; 5 elements of buffers; 0.0 MiB of memory\n");
}
