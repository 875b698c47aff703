// SPDX-License-Identifier: Apache-2.0
// An options struct with a field of every kind.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"

namespace sample {

enum class Color { Red, Green };

struct Inner {
  std::chrono::milliseconds timeout{500};
  int num_tries = 3;
};
inline void describe_fields(Inner& options, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "timeout_ms", .doc = "how long to wait", .min = 1}, options.timeout);
  visitor.field({.name = "num_tries", .doc = "how often to try", .min = 1}, options.num_tries);
}

struct Options {
  bool shuffle = true;
  int64_t batch_size = 128;
  double lr = 0.1;
  std::string dtype = "bf16";
  std::string folder;
  std::vector<int64_t> milestones = {30, 60};
  std::vector<double> betas = {0.9, 0.999};
  std::vector<std::string> tags;
  Color color = Color::Red;
  Inner inner;
};
inline void describe_fields(Options& options, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "shuffle", .doc = "another order each epoch"}, options.shuffle);
  visitor.field(
      {.name = "batch_size", .doc = "of a rank and step", .unit = "samples", .min = 1, .max = 4096},
      options.batch_size);
  visitor.field({.name = "lr", .doc = "learning rate", .min = 0}, options.lr);
  visitor.field({.name = "dtype", .doc = "what is computed in", .choices = {"bf16", "fp16", "off"}},
                options.dtype);
  visitor.field({.name = "folder", .doc = "where files are", .may_differ = true}, options.folder);
  visitor.field({.name = "milestones", .doc = "epochs | steps", .min = 0}, options.milestones);
  visitor.field({.name = "betas", .doc = "moments", .min = 0, .max = 1}, options.betas);
  visitor.field({.name = "tags", .doc = "labels"}, options.tags);
  visitor.field({.name = "color", .doc = "of the line"}, options.color,
                {{"red", Color::Red}, {"green", Color::Green}});
  visitor.section("inner", options.inner);
}

}  // namespace sample
