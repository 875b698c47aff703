// SPDX-License-Identifier: Apache-2.0
// The network of cnn_ddp for the data of a file.
#include <torch/torch.h>

#include <string>

#include "common/data_path.hpp"
#include "ddp/ddp.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "tensors/cnn_settings.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

using Catch::Contains;
using examples::LossKind;
using testing::message_of;

models::SimpleCnn make(const examples::CnnSettings& settings, const ddp::TensorMap& tensors) {
  const testing::TemporaryFolder folder;
  const auto path = folder.file("data.safetensors");
  ddp::save_safetensors(path, tensors);
  const auto data = examples::open_tensors({.path = path, .eval_rows = 1}, settings.loss);
  return examples::make_cnn(settings, data, ddp::make_single_communicator(torch::kCPU));
}

std::string refusal(const examples::CnnSettings& settings, const ddp::TensorMap& tensors) {
  return message_of<ddp::Error>([&] { make(settings, tensors); });
}

}  // namespace

TEST_CASE("the embedded waveforms are four equally frequent classes") {
  const auto file =
      ddp::load_safetensors(examples::find_data_path(examples::CnnFiles().path)).tensors;
  CHECK(file.at("waveform").sizes() == std::vector<int64_t>{960, 1, 96});
  const auto target = file.at("target").to(torch::kInt64);
  CHECK(torch::equal(target.bincount(), torch::full({4}, 240, torch::kInt64)));
  // The power of the noise alone is 1, and each kind of signal adds its own.
  const auto power = file.at("waveform").to(torch::kFloat32).square().mean({1, 2});
  for (int64_t label = 0; label < 4; ++label) {
    CAPTURE(label);
    const auto mean = power.masked_select(target == label).mean().item<double>();
    CHECK((label == 0 ? mean < 1.05 : mean > 1.5));
  }
}

TEST_CASE("cnn_ddp takes dimensions, channels and outputs from the data") {
  const auto labels = torch::arange(6, torch::kInt64).remainder(3);
  auto module = make({}, {{"spectrum", torch::zeros({6, 2, 16})}, {"target", labels}});
  CHECK(module->options().num_dims == 1);
  CHECK(module->options().in_channels == 2);
  CHECK(module->options().num_classes == 3);
  module = make({.loss = LossKind::Mse},
                {{"volume", torch::zeros({6, 1, 4, 5, 6})}, {"target", torch::zeros({6, 2})}});
  CHECK(module->options().num_dims == 3);
  CHECK(module->options().num_classes == 2);
  CHECK(module->forward(torch::zeros({3, 1, 4, 5, 6})).sizes() == std::vector<int64_t>{3, 2});
  module =
      make({.loss = LossKind::L1}, {{"x", torch::zeros({6, 1, 8})}, {"target", torch::zeros({6})}});
  CHECK(module->options().num_classes == 1);
}

TEST_CASE("cnn_ddp's batch norms become those of all ranks") {
  for (const auto& shape : {std::vector<int64_t>{6, 1, 8}, {6, 1, 4, 5}, {6, 1, 4, 5, 6}}) {
    CAPTURE(shape);
    const ddp::TensorMap tensors = {{"x", torch::randn(shape)},
                                    {"target", torch::arange(6, torch::kInt64)}};
    torch::manual_seed(1);
    auto plain = make({}, tensors);
    torch::manual_seed(1);
    auto synced = make({.sync_batch_norm = true}, tensors);
    CHECK(synced->norm("bn3")->as<ddp::SyncBatchNormImpl>() != nullptr);
    const auto& x = tensors.at("x");
    CHECK(torch::allclose(synced->forward(x), plain->forward(x), 1e-4, 1e-5));
    CHECK(torch::allclose(synced->named_buffers()["bn2.running_var"],
                          plain->named_buffers()["bn2.running_var"]));
  }
}

TEST_CASE("cnn_ddp refuses data and sizes that do not fit") {
  const auto x = torch::zeros({6, 1, 8}), values = torch::zeros({6});
  const auto labels = torch::zeros({6}, torch::kInt64);
  CHECK_THAT(refusal({}, {{"x", x}, {"y", x}, {"target", labels}}),
             Contains("has 2 input(s) besides the target"));
  CHECK_THAT(refusal({}, {{"target", labels}}), Contains("has 0 input(s) besides the target"));
  CHECK_THAT(refusal({}, {{"x", torch::zeros({6, 8})}, {"target", labels}}),
             Contains("a sample of x has the shape [8]") && Contains("dimension of 1"));
  CHECK_THAT(refusal({}, {{"x", x}, {"target", torch::zeros({6, 8}, torch::kInt64)}}),
             Contains("has the shape [8]; fix: save a target [rows]"));
  CHECK_THAT(refusal({.loss = LossKind::Mse}, {{"x", x}, {"target", torch::zeros({6, 2, 2})}}),
             Contains("[rows, values]"));
  CHECK_THAT(refusal({.channels = {4, 4, 4, 4, 4}}, {{"x", x}, {"target", labels}}),
             Contains("halve a sample of shape [1, 8] 4 times; fix: give fewer channels"));
  CHECK(make({.channels = {4, 4, 4, 4}}, {{"x", x}, {"target", labels}})->options().num_dims == 1);
  CHECK_THAT(refusal({.channels = {}}, {{"x", x}, {"target", labels}}),
             Contains("model.channels has 0 stages"));
  CHECK_THAT(refusal({.kernel_size = 4}, {{"x", x}, {"target", labels}}),
             Contains("model.kernel_size is 4"));
}
