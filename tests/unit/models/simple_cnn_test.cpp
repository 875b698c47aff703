// SPDX-License-Identifier: Apache-2.0
#include "models/simple_cnn.hpp"

#include <torch/torch.h>

#include <iterator>
#include <vector>

#include "formula.hpp"
#include "support/catch.hpp"

TEST_CASE("SimpleCnn equals the same layers written by hand") {
  models::SimpleCnn model(models::SimpleCnnOptions{.channels = {4, 6}, .num_classes = 3});
  formula::fill(*model);
  const auto x = formula::uniform("input", {5, 3, 8, 8});
  const auto p = model->named_parameters();
  auto expected = x;
  for (const std::string n : {"1", "2"}) {
    expected = n == "1" ? expected : torch::max_pool2d(expected, 2);
    expected = torch::conv2d(expected, p["conv" + n + ".weight"], {}, 1, 1);
    expected = torch::relu(torch::batch_norm(
        expected, p["bn" + n + ".weight"], p["bn" + n + ".bias"], {}, {}, true, 0.1, 1e-5, false));
  }
  expected = torch::linear(expected.mean({2, 3}), p["fc.weight"], p["fc.bias"]);
  CHECK(torch::allclose(model->forward(x), expected, 1e-5, 1e-6));
  CHECK(model->named_buffers()["bn2.num_batches_tracked"].item<int64_t>() == 1);
}

TEST_CASE("a SimpleCnn of each number of dimensions equals a Sequential of the same layers") {
  using namespace torch::nn;
  torch::manual_seed(2);
  struct Case {
    std::vector<int64_t> input;
    Sequential layers;
  };
  for (auto& [input, layers] : std::vector<Case>{
           {{5, 2, 13},
            Sequential(Conv1d(Conv1dOptions(2, 4, 5).padding(2).bias(false)), BatchNorm1d(4),
                       ReLU(), MaxPool1d(2), Conv1d(Conv1dOptions(4, 6, 5).padding(2).bias(false)),
                       BatchNorm1d(6), ReLU(), AdaptiveAvgPool1d(1), Flatten(), Linear(6, 3))},
           {{5, 2, 9, 7},
            Sequential(Conv2d(Conv2dOptions(2, 4, 5).padding(2).bias(false)), BatchNorm2d(4),
                       ReLU(), MaxPool2d(2), Conv2d(Conv2dOptions(4, 6, 5).padding(2).bias(false)),
                       BatchNorm2d(6), ReLU(), AdaptiveAvgPool2d(1), Flatten(), Linear(6, 3))},
           {{5, 2, 6, 5, 4},
            Sequential(Conv3d(Conv3dOptions(2, 4, 5).padding(2).bias(false)), BatchNorm3d(4),
                       ReLU(), MaxPool3d(2), Conv3d(Conv3dOptions(4, 6, 5).padding(2).bias(false)),
                       BatchNorm3d(6), ReLU(), AdaptiveAvgPool3d(1), Flatten(), Linear(6, 3))}}) {
    CAPTURE(input);
    models::SimpleCnn model(models::SimpleCnnOptions{.in_channels = 2,
                                                     .channels = {4, 6},
                                                     .num_classes = 3,
                                                     .num_dims = std::ssize(input) - 2,
                                                     .kernel_size = 5});
    const auto ours = model->parameters(), theirs = layers->parameters();
    REQUIRE(ours.size() == theirs.size());
    for (std::size_t i = 0; i < ours.size(); ++i) {
      const torch::NoGradGuard no_grad;
      theirs[i].copy_(ours[i]);
    }
    const auto x = formula::uniform("input", input);
    const auto out = model->forward(x), expected = layers->forward(x);
    CHECK(out.sizes() == std::vector<int64_t>{5, 3});
    CHECK(torch::allclose(out, expected, 1e-5, 1e-6));
    out.square().sum().backward();
    expected.square().sum().backward();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      CAPTURE(i);
      CHECK(torch::allclose(ours[i].grad(), theirs[i].grad(), 1e-4, 1e-5));
    }
    CHECK(torch::allclose(model->named_buffers()["bn2.running_var"],
                          layers->named_buffers()["5.running_var"]));
    const auto copy = std::dynamic_pointer_cast<models::SimpleCnnImpl>(model->clone());
    CHECK(torch::equal(copy->forward(x), out));
  }
}

TEST_CASE("a SimpleCnn's norm counts the batches of its own mode") {
  for (const bool model_trains : {false, true}) {
    CAPTURE(model_trains);
    models::SimpleCnn model(models::SimpleCnnOptions{.channels = {4, 6}, .num_classes = 3});
    model->train(model_trains);
    model->norm("bn1")->train(true);
    model->norm("bn2")->train(false);
    model->forward(torch::randn({5, 3, 8, 8}));
    const auto buffers = model->named_buffers();
    CHECK(buffers["bn1.num_batches_tracked"].item<int64_t>() == 1);
    CHECK(buffers["bn2.num_batches_tracked"].item<int64_t>() == 0);
  }
}

TEST_CASE("SimpleCnn learns a tiny problem and clones") {
  torch::manual_seed(1);
  models::SimpleCnn model(
      models::SimpleCnnOptions{.channels = {8}, .num_classes = 2, .dropout = 0.1});
  const auto x = formula::uniform("input", {16, 3, 6, 6});
  const auto target = (x.mean({1, 2, 3}) > 0).to(torch::kInt64);
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    auto loss = torch::cross_entropy_loss(model->forward(x), target);
    loss.backward();
    optimizer.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  CHECK(last < 0.8 * first);
  auto copy = std::dynamic_pointer_cast<models::SimpleCnnImpl>(model->clone());
  model->eval();
  copy->eval();
  CHECK(torch::equal(copy->forward(x), model->forward(x)));
}

TEST_CASE("SimpleCnn refuses wrong options") {
  CHECK_THROWS_AS(models::SimpleCnn(models::SimpleCnnOptions{.channels = {}}),
                  std::invalid_argument);
  CHECK_THROWS_AS(models::SimpleCnn(models::SimpleCnnOptions{.dropout = 1.0}),
                  std::invalid_argument);
  CHECK_THROWS_AS(models::SimpleCnn(models::SimpleCnnOptions{.num_dims = 4}),
                  std::invalid_argument);
  CHECK_THROWS_AS(models::SimpleCnn(models::SimpleCnnOptions{.kernel_size = 4}),
                  std::invalid_argument);
}
