// SPDX-License-Identifier: Apache-2.0
// What the image programs share: opens the data, trains a wrapped classifier, prints the summary.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>

#include "ddp/ddp.hpp"

namespace examples {

struct ImageData {
  std::shared_ptr<ddp::Dataset> train;
  std::shared_ptr<ddp::Dataset> test;
  ddp::DataOptions options = {};  ///< that opened both
};
/// Throws DataError if the splits' classes differ.
ImageData open_image_data(ddp::DataOptions options, bool channels_last = false);

/// The class's name in the data, without control characters, or "class 3".
std::string class_name(const ImageData& data, int64_t number);

/// The loader's image dtype for a model of `parameter_dtype`: its compute dtype or, with mixup, the
/// configured one, because mixup needs unrounded images. Throws SettingsError if amp.dtype
/// contradicts `parameter_dtype`.
ddp::ImageDtype choose_image_dtype(const ddp::Config& cfg, c10::ScalarType parameter_dtype);

/// What the summary's line "next" proposes.
struct ImageProgram {
  const char* name;
  const char* longer_run;      ///< command for more epochs on the sample
  const char* cifar10_config;  ///< for all of CIFAR-10, at a global batch of 512
};

/// A wrapped classifier; `model` wraps `module`.
struct ImageModel {
  ddp::DataParallelModel& model;
  torch::nn::Module& module;
  std::function<at::Tensor(const at::Tensor&)> forward;  ///< the wrapper's
  double ema_decay = 0;  ///< evaluations use the average of the weights; 0: off
  /// ImageParts::own_loss
  std::function<at::Tensor(const ddp::Batch&)> own_loss = {};
  std::string weights = "";                 ///< SampleModel::weights
  std::function<void()> save_trained = {};  ///< SampleModel::save_trained
};

/// Trains as the settings say, with evaluations and checkpoints. With `only_evaluates` or
/// checkpoint.resume=best, reports loss and accuracy, in all and per class, of what
/// restore_trained() loads. Collective.
void train_images(ddp::Context& ctx, ddp::Config cfg, const ImageData& data,
                  const ImageModel& classifier, const ImageProgram& program,
                  bool only_evaluates = false);

}  // namespace examples
