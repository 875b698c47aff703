// SPDX-License-Identifier: Apache-2.0
// Evaluation images equal torchvision's.
#include <torch/torch.h>

#include <cmath>

#include "ddp/core/error.hpp"
#include "ddp/data/data_loader.hpp"
#include "support/catch.hpp"
#include "unit/data/images/eval_golden.hpp"

using data_test::Difference;
using data_test::TempFolder;

TEST_CASE("an evaluation image has torchvision's pixels", "[eval_images]") {
  const auto cases = data_test::eval_cases();
  REQUIRE(cases.size() == 10);
  for (const auto& eval : cases) {
    for (const auto cache : {ddp::CachePolicy::Off, ddp::CachePolicy::Ram}) {
      TempFolder folder;
      ddp::DataOptions options = data_test::eval_options(folder, eval);
      options.cache = cache;
      Difference found{-1, -1};
      const std::string error = data_test::message_of<ddp::DataError>([&] {
        const auto dataset = ddp::make_dataset(options, ddp::Split::Test);
        ddp::DataLoader loader(dataset, ddp::DistributedSampler(1, 0, 1), at::kCPU,
                               {.batch_size = 1});
        found = data_test::difference_of(loader.next().data[0], eval);
      });
      CAPTURE(eval.name, cache == ddp::CachePolicy::Ram, error, found.mean);
      CHECK(found.largest >= 0);
      CHECK(found.largest <= 1.001);  // a level of 255
    }
  }
}

TEST_CASE("images decoded at a fraction of their size are aligned with whole ones",
          "[eval_images]") {
  for (const auto& eval : data_test::eval_cases()) {
    TempFolder folder;
    ddp::DataOptions options = data_test::eval_options(folder, eval);
    options.cache = ddp::CachePolicy::Off;
    options.eval_decode = ddp::EvalDecode::Scaled;
    const auto image = ddp::make_dataset(options, ddp::Split::Test)->get(0).data;
    const auto found = data_test::difference_of(image, eval);
    CAPTURE(eval.name, found.largest, found.mean);
    // PNG images and images too small for 1/2 differ only by the rounding to bytes. The others lose
    // a fine pattern. An offset of half an output pixel would give 9 and more.
    const bool whole = eval.name == "enlarged" || eval.name == "full" || eval.name == "png" ||
                       eval.name == "palette";
    CHECK(found.mean <= (whole ? 0.4 : 5.5));
  }
}
