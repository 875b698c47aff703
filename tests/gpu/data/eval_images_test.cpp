// SPDX-License-Identifier: Apache-2.0
// Evaluation images that the GPU finishes or stores: torchvision's pixels, and the CPU's bits.
#include <torch/torch.h>

#include "ddp/data/data_loader.hpp"
#include "support/catch.hpp"
#include "unit/data/images/eval_golden.hpp"

using ddp::DataLoader;
using ddp::DistributedSampler;

TEST_CASE("an evaluation image made on the GPU has torchvision's pixels", "[eval_images]") {
  const at::Device gpu(at::kCUDA, 0);
  const DistributedSampler sampler(1, 0, 1);
  const auto cases = data_test::eval_cases();
  REQUIRE(cases.size() == 10);
  for (const auto& eval : cases) {
    for (const auto cache : {ddp::CachePolicy::Off, ddp::CachePolicy::Ram}) {
      for (const auto decoder : {ddp::JpegDecoder::Cpu, ddp::JpegDecoder::NvJpeg}) {
        const bool resident = cache == ddp::CachePolicy::Ram;
        CAPTURE(eval.name, resident, decoder == ddp::JpegDecoder::NvJpeg);
        data_test::TempFolder folder;
        ddp::DataOptions options = data_test::eval_options(folder, eval);
        options.cache = cache;
        const auto dataset = ddp::make_dataset(options, ddp::Split::Test);
        DataLoader loader(dataset, sampler, gpu, {.batch_size = 1, .jpeg_decoder = decoder});
        CHECK((loader.device_images() != nullptr) == resident);
        const auto batch = loader.next();
        REQUIRE(batch.data.is_cuda());
        CHECK(data_test::difference_of(batch.data[0], eval).largest <= 1.001);
        DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 1});
        CHECK(torch::equal(batch.data.cpu(), cpu.next().data));
      }
    }
  }
}

TEST_CASE("evaluation images decoded at a part of their size have the CPU's bits too",
          "[eval_images]") {
  for (const auto& eval : data_test::eval_cases()) {
    CAPTURE(eval.name);
    data_test::TempFolder folder;
    ddp::DataOptions options = data_test::eval_options(folder, eval);
    options.cache = ddp::CachePolicy::Off;
    options.eval_decode = ddp::EvalDecode::Scaled;
    const auto dataset = ddp::make_dataset(options, ddp::Split::Test);
    const DistributedSampler sampler(1, 0, 1);
    DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 1});
    DataLoader gpu(dataset, sampler, at::Device(at::kCUDA, 0), {.batch_size = 1});
    CHECK(torch::equal(gpu.next().data.cpu(), cpu.next().data));
  }
}
