// SPDX-License-Identifier: Apache-2.0
// Parts of the examples that need no ranks.
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/data_path.hpp"
#include "common/run_plan.hpp"
#include "common/training_report.hpp"
#include "ddp/ddp.hpp"
#include "exported/exported_settings.hpp"
#include "images/image_trainer.hpp"
#include "images/model_options.hpp"
#include "images/vit_settings.hpp"
#include "language/language_options.hpp"
#include "language/language_sections.hpp"
#include "models/resnet.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "tensors/cnn_settings.hpp"
#include "unit/train/temporary_folder.hpp"
#include "unit/train/thread_control_plane.hpp"

TEST_CASE("an epoch's steps hold all its batches") {
  CHECK(examples::steps_per_epoch(10, 1) == 10);
  CHECK(examples::steps_per_epoch(10, 3) == 4);
  CHECK(examples::steps_per_epoch(9, 3) == 3);
  CHECK(examples::steps_per_epoch(0, 2) == 1);
}

TEST_CASE("a schedule takes every batch once per epoch, and evaluates and logs when it should") {
  ddp::TrainOptions train;
  train.grad_accum_steps = 3;
  train.eval_every = 2;
  // Three epochs of four steps; the last step of an epoch has one batch.
  const examples::StepSchedule schedule(train, 10, 12, 5);
  std::string batches, epochs, logged, ends, evaluations;
  for (int64_t step = 0; step < 12; ++step) {
    batches += std::to_string(schedule.num_batches(step));
    epochs += std::to_string(schedule.epoch_of(step));
    logged += schedule.is_logged(step) ? "x" : ".";
    ends += schedule.ends_epoch(step) ? "x" : ".";
    evaluations += schedule.evaluates_after(step) ? "x" : ".";
  }
  CHECK(batches == "333133313331");
  CHECK(epochs == "000011112222");
  CHECK(logged == "....x....x..");
  CHECK(ends == "...x...x...x");
  CHECK(evaluations == ".......x...x");
  train.eval_every_steps = 5;
  const examples::StepSchedule by_steps(train, 10, 11, 0);
  CHECK(by_steps.evaluates_after(4));
  CHECK_FALSE(by_steps.evaluates_after(7));
  CHECK(by_steps.evaluates_after(10));  // the last step
  CHECK(by_steps.ends_epoch(10));
  CHECK_FALSE(by_steps.is_logged(4));
}

using testing::message_of;

namespace {

struct NamedClasses : ddp::Dataset {
  explicit NamedClasses(std::vector<std::string> names_in) : names(std::move(names_in)) {}
  int64_t size() const override { return 0; }
  ddp::Example get(int64_t) const override { return {}; }
  std::vector<std::string> class_names() const override { return names; }
  std::vector<std::string> names;
};

}  // namespace

TEST_CASE("splits whose classes have other numbers are refused") {
  const auto compare = [](std::vector<std::string> train, std::vector<std::string> test) {
    return message_of<ddp::DataError>([&] {
      examples::require_same_classes(NamedClasses(std::move(train)), NamedClasses(std::move(test)));
    });
  };
  CHECK(compare({"ant", "bee"}, {"ant", "bee"}) == "");
  CHECK(compare({"ant", "bee"}, {}) == "");
  CHECK_THAT(compare({"ant", "bee", "cat"}, {"ant", "cat"}),
             Catch::Contains("class 1 is 'bee' in the training data and 'cat' in the test data"));
  CHECK_THAT(compare({"ant", "bee"}, {"ant"}),
             Catch::Contains("class 1 is 'bee' in the training data and missing in the test data"));
}

TEST_CASE("ranks with different numbers of batches are refused on all") {
  const auto errors = testing::run_ranks(3, [](ddp::ControlPlane& plane) {
    examples::require_equal_batches(5, plane);
    examples::require_equal_batches(plane.rank() == 2 ? 5 : 6, plane);
  });
  for (const auto& error : errors) {
    REQUIRE(error);
    CHECK_THAT(message_of<ddp::SettingsError>([&] { std::rethrow_exception(error); }),
               Catch::Contains("gives rank 0 6 training batches per epoch and rank 2 5") &&
                   Catch::Contains("fix: sampler.pad=true"));
  }
}

TEST_CASE("the configs that ship are accepted by their program") {
  const auto sections_of = [](const std::string& name) -> std::vector<ddp::Section> {
    if (name.starts_with("lora_") || name.ends_with("_full.yaml")) {
      return examples::lora_sections();
    }
    if (name.starts_with("exported_")) {
      return examples::exported_sections();
    }
    if (name.starts_with("cnn_")) {
      return examples::cnn_sections();
    }
    if (name.starts_with("bert_")) {
      return examples::bert_sections();
    }
    if (name.find("vit_") != std::string::npos) {
      return examples::vit_sections();
    }
    return name.starts_with("gpt2_") ? examples::gpt2_sections() : examples::resnet_sections();
  };
  int count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(examples::find_data_path("examples/configs"))) {
    INFO(entry.path());
    const auto path = entry.path().string();
    const char* const arguments[] = {"program", "--config", path.c_str()};
    const auto config =
        ddp::Config::from_command_line(3, arguments, sections_of(entry.path().filename().string()));
    auto schedule = config.lr_schedule;
    if (schedule.total_steps == 0) {
      schedule.total_steps = config.train.num_steps(1000);
    }
    CHECK_NOTHROW(ddp::LrSchedule(schedule));
    ++count;
  }
  CHECK(count >= 24);
}

TEST_CASE("language programs refuse settings of images, and train text without a file") {
  const auto parse = [](const std::vector<ddp::Section>& sections, const char* argument) {
    const char* const arguments[] = {"program", argument};
    return ddp::Config::from_command_line(2, arguments, sections);
  };
  for (const auto& sections : {examples::lora_sections(), examples::gpt2_sections()}) {
    for (const char* image :
         {"train.label_smoothing=0.3", "train.mixup=0.2", "train.cutmix=1", "data.format=tar"}) {
      CHECK_THAT(message_of<ddp::SettingsError>([&] { parse(sections, image); }),
                 Catch::Contains("unknown setting"));
    }
    CHECK_THAT(message_of<ddp::SettingsError>([&] { parse(sections, "data.path=/nonexistent"); }),
               Catch::Contains("unknown setting 'data.path'; did you mean tokens.path?"));
    const auto config = parse(sections, "train.batch_size=3");
    CHECK(config.optimizer.type == ddp::OptimizerType::AdamW);
    CHECK(config.lr_schedule.type == ddp::LrScheduleType::Cosine);
    CHECK(config.lr_schedule.lr < 0.01);
    CHECK(config.lr_schedule.total_steps == config.train.max_steps);
    CHECK(config.train.max_grad_norm == 1);
    CHECK(config.loader.batch_size == 3);
    CHECK(config.to_yaml().find("mixup") == std::string::npos);
    CHECK(config.to_yaml().find("cutmix") == std::string::npos);
  }
}

TEST_CASE("a parameter hash sees every bit, the names and the shapes") {
  const auto values = torch::randn({5, 3});
  const auto hash = examples::parameter_hash({{"a", values}});
  CHECK(hash.size() == 16);
  CHECK(examples::parameter_hash({{"a", values.clone()}}) == hash);
  auto strided = torch::empty_strided({5, 3}, {1, 5}).copy_(values);
  CHECK(examples::parameter_hash({{"a", strided}}) == hash);
  CHECK(examples::parameter_hash({{"b", values}}) != hash);
  CHECK(examples::parameter_hash({{"a", values.view({3, 5})}}) != hash);
  auto changed = values.clone();
  reinterpret_cast<uint32_t*>(changed.data_ptr())[14] ^= 1U;  // one bit of the last value
  CHECK(examples::parameter_hash({{"a", changed}}) != hash);
}

TEST_CASE("shipped files are found from any working folder") {
  namespace fs = std::filesystem;
  const auto before = fs::current_path();
  fs::current_path(fs::temp_directory_path());
  const auto found = examples::find_data_path("examples/configs/quickstart.yaml");
  const auto missing = examples::find_data_path("no/such/file");
  fs::current_path(before);
  CHECK(fs::path(found).is_absolute());
  CHECK(fs::exists(found));
  CHECK(missing == "no/such/file");
  CHECK(examples::find_data_path("/no/such/file") == "/no/such/file");
}

TEST_CASE("convert_sync_batchnorm reaches every norm of a ResNet, and changes nothing alone") {
  torch::manual_seed(3);
  auto plain = models::resnet50({.num_classes = 5, .stem = models::Stem::Cifar});
  auto model = std::dynamic_pointer_cast<models::ResNetImpl>(plain->clone());
  ddp::convert_sync_batchnorm(*model, ddp::make_single_communicator(torch::kCPU));
  int converted = 0;
  for (const auto& module : model->modules()) {
    REQUIRE(module->as<torch::nn::BatchNorm2dImpl>() == nullptr);
    converted += module->as<ddp::SyncBatchNormImpl>() != nullptr ? 1 : 0;
  }
  CHECK(converted == 53);
  const auto names = plain->named_parameters().keys();
  CHECK(model->named_parameters().keys() == names);
  const auto images = torch::randn({4, 3, 16, 16});
  CHECK(torch::allclose(model->forward(images), plain->forward(images), 1e-4, 1e-4));
}

TEST_CASE("a ViT takes its sizes from the settings and the data") {
  const auto data =
      ddp::make_dataset({.format = ddp::DataFormat::Synthetic, .image_size = 24, .num_classes = 7});
  const auto communicator = ddp::make_single_communicator(torch::kCPU);
  examples::VitSettings settings;
  settings.name = "vit_ti_16";
  settings.patch_size = 6;
  settings.dropout = 0.25;
  settings.stochastic_depth = 0.5;
  settings.dtype = torch::kBFloat16;
  const auto module = examples::make_vit(settings, *data, communicator);
  const auto& options = module->options();
  CHECK(options.image_size == 24);
  CHECK(options.patch_size == 6);
  CHECK(options.num_classes == 7);
  CHECK(options.hidden_size == 192);
  CHECK(options.dropout == 0.25);
  CHECK(options.stochastic_depth == 0.5);
  for (const auto& parameter : module->parameters()) {
    CHECK(parameter.scalar_type() == torch::kBFloat16);
  }
  const auto grey = ddp::make_dataset(
      {.format = ddp::DataFormat::Synthetic, .image_size = 24, .channels = 1, .num_classes = 7});
  CHECK(testing::message_of<ddp::SettingsError>([&] {
          examples::make_vit(settings, *grey, communicator);
        }).find("needs images of 3 channels, not 1; fix: set data.channels=3") !=
        std::string::npos);
  settings.patch_size = 0;  // that of the name, 16
  CHECK(testing::message_of<ddp::SettingsError>([&] {
          examples::make_vit(settings, *data, communicator);
        }).find("patches of 16 pixels do not divide images of 24; fix: set model.patch_size") !=
        std::string::npos);
}

TEST_CASE("a SimpleCnn takes the settings of a ResNet that it has, and refuses the others") {
  const auto data = ddp::make_dataset(
      {.format = ddp::DataFormat::Synthetic, .image_size = 16, .channels = 1, .num_classes = 7});
  const auto communicator = ddp::make_single_communicator(torch::kCPU);
  examples::ModelOptions options;
  options.name = examples::kSimpleCnn;
  options.sync_batch_norm = true;
  options.channels_last = true;
  options.dtype = torch::kBFloat16;
  auto module = examples::make_simple_cnn(options, *data, communicator);
  CHECK(module->options().in_channels == 1);
  CHECK(module->options().num_classes == 7);
  CHECK(module->norm("bn2")->as<ddp::SyncBatchNormImpl>() != nullptr);
  const auto parameters = module->named_parameters();
  CHECK(parameters["conv2.weight"].scalar_type() == torch::kBFloat16);
  CHECK(parameters["conv2.weight"].is_contiguous(at::MemoryFormat::ChannelsLast));
  CHECK(parameters["bn2.weight"].scalar_type() == torch::kFloat32);
  // Images that mixup needs whole are cast by the model.
  CHECK(module->forward(torch::randn({2, 1, 16, 16})).scalar_type() == torch::kBFloat16);

  const auto error_with = [&](auto&& change) {
    examples::ModelOptions other;
    other.name = examples::kSimpleCnn;
    change(other);
    return message_of<ddp::SettingsError>(
        [&] { examples::make_simple_cnn(other, *data, communicator); });
  };
  CHECK(error_with([](auto&) {}) == "");
  CHECK(
      error_with([](auto& o) { o.stem = "cifar"; }) ==
      "model.stem is set, but model.name=simple_cnn has no such option; fix: leave it out, or set "
      "model.name=resnet18");
  CHECK_THAT(error_with([](auto& o) { o.zero_init_residual = true; }),
             Catch::StartsWith("model.zero_init_residual is set"));
  CHECK_THAT(error_with([](auto& o) { o.ops = "plain"; }), Catch::StartsWith("model.ops is set"));
  CHECK_THAT(error_with([](auto& o) { o.weights = "w.safetensors"; }),
             Catch::StartsWith("model.weights is set"));
}

TEST_CASE("images come in the model's compute dtype, but whole for mixup") {
  ddp::Config cfg;
  const auto chosen = [&](c10::ScalarType dtype) {
    return examples::choose_image_dtype(cfg, dtype);
  };
  CHECK(chosen(torch::kFloat32) == ddp::ImageDtype::Auto);
  CHECK(chosen(torch::kBFloat16) == ddp::ImageDtype::Bf16);
  cfg.amp.dtype = ddp::AmpDtype::Fp16;
  CHECK(chosen(torch::kFloat32) == ddp::ImageDtype::Fp16);
  CHECK_THROWS_AS(chosen(torch::kBFloat16), ddp::SettingsError);
  cfg.amp.dtype = ddp::AmpDtype::Bf16;
  CHECK(chosen(torch::kFloat32) == ddp::ImageDtype::Bf16);
  cfg.train.cutmix = 1;  // copies pixels
  CHECK(chosen(torch::kBFloat16) == ddp::ImageDtype::Bf16);
  cfg.train.mixup = 0.2;
  CHECK(chosen(torch::kFloat32) == ddp::ImageDtype::Auto);
  CHECK(chosen(torch::kBFloat16) == ddp::ImageDtype::Auto);
}
