// SPDX-License-Identifier: Apache-2.0
// What resnet_ddp and vit_ddp do with a classifier: they train it, evaluate it, or classify the
// image files on the command line.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ddp/ddp.hpp"
#include "images/image_trainer.hpp"

namespace examples {

/// Section `run`, and the arguments that are no settings.
struct ImageRun {
  std::string mode = "train";
  std::vector<std::string> files = {};  ///< not a setting: image files to classify
};
void describe_fields(ImageRun& run, ddp::FieldVisitor& visitor);

/// The sections that image programs add: `model`, which the program declares, and `run`.
std::vector<ddp::Section> image_sections(ddp::Section model);

/// ddp::run for a program whose arguments may name image files. Throws SettingsError in the run if
/// there are files without run.mode=classify, or run.mode=classify without files.
using ImageFunction = std::function<void(ddp::Context&, const ddp::Config&, const ImageRun&)>;
int run_image_program(int argc, const char* const* argv, const ImageFunction& function,
                      const std::vector<ddp::Section>& sections);

/// Does what `run` says. Rank 0 prints the results. Collective.
void run_images(ddp::Context& ctx, const ddp::Config& cfg, const ImageRun& run,
                const ImageData& data, const ImageModel& classifier, const ImageProgram& program);

}  // namespace examples
