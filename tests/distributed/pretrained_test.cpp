// SPDX-License-Identifier: Apache-2.0
// Weights that the ranks of a group read in parts and share. The bits equal those of one reader at
// any number of ranks, and a failure on one rank is an error on all.
#include <filesystem>

#include "models/pretrained/hf_weights.hpp"
#include "support/multi_rank_main.hpp"
#include "unit/pretrained/pretrained_test_support.hpp"

namespace {

using ddp::test::context;
using models::WeightRoute;
using testing::message_of;
using testing::NamedModule;
using testing::write_file;

// A folder that all ranks know (a temporary one from their launcher), filled by rank 0.
class SharedFolder {
 public:
  explicit SharedFolder(const std::string& name)
      : path_((std::filesystem::temp_directory_path() /
               ddp::concat("ddp_pretrained_", name, "_", context().world_size()))
                  .string()) {
    if (context().is_main()) {
      std::filesystem::remove_all(path_);
      std::filesystem::create_directories(path_);
    }
  }
  ~SharedFolder() {
    if (context().is_main()) {
      std::error_code ignored;
      std::filesystem::remove_all(path_, ignored);
    }
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Integers, exact in every dtype. No number of ranks, chunk or block divides the sizes.
ddp::TensorMap tensors_of(at::ScalarType dtype) {
  const auto values = [&](int64_t count, int64_t step) {
    return (torch::arange(count, at::kLong) * step % 251).to(dtype);
  };
  return {{"a.weight", values(700'001, 3).view({1, 700'001})},
          {"b.bias", values(3, 100)},
          {"c.weight", values(2'500'010, 7).view({10, 250'001})},
          {"d.weight", values(0, 1)},
          {"e.weight", values(999, 5).view({27, 37})}};
}

void expect_equal(const torch::nn::Module& module, const ddp::TensorMap& expected) {
  const auto weights = ddp::named_weights(module);
  for (const auto& [name, tensor] : expected) {
    INFO(name);
    CHECK(torch::equal(weights.at(name), tensor.to(weights.at(name).options())));
  }
}

}  // namespace

TEST_CASE("ranks share the reading") {
  const SharedFolder folder("share");
  auto communicator = context().communicator();
  for (const auto stored : {at::kFloat, at::kBFloat16}) {
    const auto tensors = tensors_of(stored);
    if (context().is_main()) {
      std::filesystem::remove_all(folder.path() + "/model");
      models::save_pretrained(NamedModule(tensors),
                              models::make_hf_config(models::Qwen2Options{}, stored),
                              folder.path() + "/model", {.max_shard_bytes = 9'000'000});
    }
    communicator->barrier();
    for (const auto& [threads, chunk_mb] : {std::pair{1, 1}, {3, 1}, {2, 13}, {4, 256}}) {
      NamedModule module(testing::zeros_like(tensors));
      module.to(context().device(), stored == at::kFloat ? at::kBFloat16 : at::kFloat);
      const auto load = models::load_pretrained(
          module, folder.path() + "/model", communicator.get(),
          {.route = WeightRoute::Shared, .num_threads = threads, .chunk_mb = chunk_mb});
      CHECK(load.num_bytes == 3'201'013 * static_cast<int64_t>(c10::elementSize(stored)));
      expect_equal(module, tensors);
    }
    NamedModule module(testing::zeros_like(tensors));
    models::load_pretrained(module, folder.path() + "/model", communicator.get());
    expect_equal(module, tensors);
    communicator->barrier();
  }
}

TEST_CASE("a failure of one rank is everybody's") {
  const SharedFolder folder("fail");
  auto communicator = context().communicator();
  const auto tensors = tensors_of(at::kHalf);
  const bool last = context().rank() == context().world_size() - 1;
  if (context().is_main()) {
    ddp::save_safetensors(folder.path() + "/whole.safetensors", tensors);
    auto other = tensors;
    other["e.weight"] = other["e.weight"].to(at::kFloat);
    ddp::save_safetensors(folder.path() + "/other.safetensors", other);
  }
  communicator->barrier();
  for (const auto route : {WeightRoute::Shared, WeightRoute::Mapped}) {
    NamedModule module(testing::zeros_like(tensors));
    module.to(context().device());
    const auto load = [&](const std::string& name) {
      models::load_pretrained(module, folder.path() + "/" + name, communicator.get(),
                              {.route = route, .chunk_mb = 1});
    };
    const auto missing =
        message_of<ddp::ReadError>([&] { load(last ? "none.safetensors" : "whole.safetensors"); });
    CHECK_THAT(missing, Catch::Contains(last ? "cannot read" : "on another rank"));
    expect_equal(module, testing::zeros_like(tensors));
    if (context().world_size() > 1) {
      const auto different = message_of<ddp::MismatchError>(
          [&] { load(last ? "other.safetensors" : "whole.safetensors"); });
      CHECK_THAT(different, Catch::Contains("the ranks see different weights"));
      expect_equal(module, testing::zeros_like(tensors));
    }
    load("whole.safetensors");
    expect_equal(module, tensors);
  }
  communicator->barrier();
}
