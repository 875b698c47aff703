// SPDX-License-Identifier: Apache-2.0
// Data sets of tensors, and data sets that make whole batches.
#include "ddp/data/tensor_dataset.hpp"

#include <ATen/ATen.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/safetensors.hpp"
#include "ddp/data/data_loader.hpp"
#include "support/catch.hpp"
#include "support/same_bits.hpp"
#include "unit/data/data_test_support.hpp"

using Catch::Contains;
using data_test::message_of;
using ddp::DataLoader;
using ddp::DistributedSampler;
using ddp::TensorDataset;
using ddp::TensorListDataset;
using testing::same_bits;

namespace {

const at::Tensor kData = at::arange(53 * 6, at::kFloat).view({53, 2, 3});
const at::Tensor kTarget = at::arange(53, at::kLong) * 10;

at::Tensor order_of(const DistributedSampler& sampler) {
  return at::tensor(sampler.indices(), at::kLong);
}

}  // namespace

TEST_CASE("batches of a TensorDataset are the rows in the sampler's order", "[tensors]") {
  const int64_t num_workers = GENERATE(0, 1, 3);
  const auto dataset = std::make_shared<TensorDataset>(kData, kTarget);
  const DistributedSampler sampler(dataset->size(), 1, 2, {.seed = 3});
  DataLoader loader(dataset, sampler, at::kCPU, {.batch_size = 8, .num_workers = num_workers});
  std::vector<at::Tensor> data, target;
  for (auto& batch : loader) {
    REQUIRE(batch.size() == batch.target.size(0));
    data.push_back(batch.data);
    target.push_back(batch.target);
  }
  REQUIRE(data.size() == 4);
  const auto order = order_of(sampler);
  REQUIRE(same_bits(at::cat(data), kData.index_select(0, order)));
  REQUIRE(same_bits(at::cat(target), kTarget.index_select(0, order)));
  // Structured bindings work as with PyTorch.
  const auto [x, y] = loader.next();
  REQUIRE(same_bits(x.select(1, 0).select(1, 0).to(at::kLong) * 10, y * 6));
}

TEST_CASE("a data set of tensors may have any dtype and strides, and any number of tensors") {
  // Column order, as of a .npy file in Fortran order.
  const auto columns = at::arange(12, at::kFloat).view({3, 4}).t();
  std::vector<at::Tensor> tensors{columns};
  for (const auto dtype : {at::kBool, at::kByte, at::kChar, at::kShort, at::kUInt16, at::kInt,
                           at::kUInt32, at::kLong, at::kUInt64, at::kHalf, at::kBFloat16,
                           at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    tensors.push_back(at::arange(4, at::kLong).to(dtype));
    tensors.push_back(at::arange(8, at::kLong).to(dtype).view({4, 2}));
  }
  const auto dataset = std::make_shared<TensorListDataset>(tensors);
  DataLoader loader(dataset, DistributedSampler(4, 0, 1, {.shuffle = false}), at::kCPU,
                    {.batch_size = 3});
  const std::vector<at::Tensor> batch = loader.next();
  REQUIRE(batch.size() == tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    REQUIRE(same_bits(batch[i], tensors[i].narrow(0, 0, 3)));
    REQUIRE(same_bits(dataset->get(2)[i], tensors[i][2]));
  }
}

TEST_CASE("a collate function of the user's gets the samples of a TensorDataset", "[tensors]") {
  const auto dataset = std::make_shared<TensorDataset>(kData, kTarget);
  DataLoader loader(dataset, DistributedSampler(53, 0, 1, {.shuffle = false}), at::kCPU,
                    {.batch_size = 2}, [](const std::vector<ddp::Example>& samples) {
                      return std::vector<at::Tensor>{samples[1].data, samples[0].target};
                    });
  const auto batch = loader.next();
  REQUIRE(same_bits(batch[0], kData[1]));
  REQUIRE(same_bits(batch[1], kTarget[0]));
}

TEST_CASE("tensors of a safetensors file are a data set in two lines", "[tensors]") {
  const data_test::TempFolder folder;
  const std::string path = (folder.path() / "data.safetensors").string();
  ddp::save_safetensors(path, {{"x", kData}, {"y", kTarget}});

  const auto tensors = ddp::load_safetensors(path).tensors;
  const auto dataset = std::make_shared<TensorDataset>(tensors.at("x"), tensors.at("y"));

  REQUIRE(same_bits(dataset->get(52).data, kData[52]));
}

TEST_CASE("gradients do not reach the tensors of a data set", "[tensors]") {
  const TensorDataset dataset(kData.clone().requires_grad_(), kTarget);
  REQUIRE_FALSE(dataset.get_batch({1, 2}).data.requires_grad());
}

TEST_CASE("unsuitable tensors are refused", "[tensors]") {
  const auto error = [](std::vector<at::Tensor> tensors) {
    return message_of<ddp::SettingsError>([&] { TensorListDataset{std::move(tensors)}; });
  };
  REQUIRE_THAT(error({}), Contains("needs at least one tensor; fix: "));
  REQUIRE_THAT(error({kData, kTarget.narrow(0, 0, 50)}),
               Contains("tensor 0 of a data set of tensors has 53 samples and tensor 1 has 50"));
  REQUIRE_THAT(error({kData, at::Tensor()}),
               Contains("tensor 1 of a data set") && Contains("is undefined; fix: "));
  REQUIRE_THAT(error({kTarget[0]}), Contains("is a scalar; fix: "));
  REQUIRE_THAT(error({at::empty({3}, at::kMeta)}), Contains("is on meta; fix: pass tensor.cpu()"));
}

TEST_CASE("samples that do not exist are refused", "[tensors]") {
  const int64_t index = GENERATE(-1, 53);
  const TensorDataset dataset(kData, kTarget);
  const std::string message = "sample " + std::to_string(index) +
                              " does not exist: the data set has 53; fix: pass an index from 0 to "
                              "52";
  REQUIRE(message_of<ddp::SettingsError>([&] { dataset.get(index); }) == message);
  REQUIRE(message_of<ddp::SettingsError>([&] { dataset.get_batch({0, index}); }) == message);
}

namespace {

// Makes whole batches, and has no single samples.
struct Squares {
  int64_t bad = -1;
  int64_t size() const { return 20; }
  std::vector<int64_t> get_batch(const std::vector<int64_t>& indices) const {
    std::vector<int64_t> squares;
    for (const int64_t index : indices) {
      if (index == bad) {
        throw ddp::DataError("row 7 is damaged");
      }
      squares.push_back(index * index);
    }
    return squares;
  }
};

// Returns a reference to its only batch.
struct OneBatch {
  std::vector<int64_t> batch{4, 2};
  int64_t size() const { return 2; }
  const std::vector<int64_t>& get_batch(const std::vector<int64_t>&) const { return batch; }
};

struct Derived : ddp::Dataset {
  int64_t size() const override { return 5; }
  ddp::Example get(int64_t) const override { throw std::logic_error("not for whole batches"); }
  std::vector<int64_t> get_batch(std::vector<int64_t> indices) const { return indices; }
};

}  // namespace

TEST_CASE("a data set of the user's may make whole batches", "[tensors]") {
  const DistributedSampler sampler(20, 0, 1, {.shuffle = false});
  DataLoader loader(std::make_shared<Squares>(), sampler, at::kCPU, {.batch_size = 3});
  REQUIRE(loader.next() == std::vector<int64_t>{0, 1, 4});
  REQUIRE(loader.next() == std::vector<int64_t>{9, 16, 25});
  loader.begin_epoch(1);
  REQUIRE(loader.next() == std::vector<int64_t>{0, 1, 4});

  DataLoader broken(std::make_shared<Squares>(Squares{.bad = 7}), sampler, at::kCPU,
                    {.batch_size = 6});
  broken.next();
  REQUIRE(message_of<ddp::DataError>([&] { broken.next(); }) ==
          "row 7 is damaged (loading the batch of samples 6, 7, 8, 9, … of epoch 0)");

  DataLoader derived(std::make_shared<Derived>(), DistributedSampler(5, 0, 1, {.shuffle = false}),
                     at::kCPU, {.batch_size = 2});
  REQUIRE(derived.next() == std::vector<int64_t>{0, 1});
}

TEST_CASE("get_batch and a collate function may return references", "[tensors]") {
  const DistributedSampler sampler(2, 0, 1, {.shuffle = false});
  DataLoader batches(std::make_shared<OneBatch>(), sampler, at::kCPU, {.batch_size = 2});
  static_assert(std::is_same_v<decltype(batches.next()), std::vector<int64_t>>);
  REQUIRE(batches.next() == std::vector<int64_t>{4, 2});
  REQUIRE(batches.next() == std::vector<int64_t>{4, 2});

  const std::vector<int64_t> batch{7};
  const auto collate = [&](const std::vector<ddp::Example>&) -> const std::vector<int64_t>& {
    return batch;
  };
  const auto dataset = std::make_shared<TensorDataset>(kData, kTarget);
  DataLoader collated(dataset, DistributedSampler(53, 0, 1), at::kCPU, {}, collate);
  REQUIRE(collated.next() == std::vector<int64_t>{7});
}

TEST_CASE("errors of a collate function name the samples and the epoch", "[tensors]") {
  const auto dataset = std::make_shared<TensorDataset>(kData, kTarget);
  const auto collate = [](const std::vector<ddp::Example>&) -> ddp::Batch {
    throw std::logic_error("ragged samples");
  };
  DataLoader loader(dataset, DistributedSampler(53, 0, 1, {.shuffle = false}), at::kCPU,
                    {.batch_size = 2}, collate);
  loader.begin_epoch(3);
  REQUIRE(message_of<ddp::Error>([&] { loader.next(); }) ==
          "ragged samples (loading the batch of samples 0, 1 of epoch 3)");
}
