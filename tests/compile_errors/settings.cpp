// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/run.hpp"

namespace {

enum class Shape { Round, Square };

struct Undescribed {
  int64_t width = 3;
};

struct Nested {
  Undescribed inner;
};
void describe_fields(Nested& options, ddp::FieldVisitor& visitor) {
  // error: define void describe_fields(T&, ddp::FieldVisitor&) in the namespace of the settings
  visitor.section("inner", options.inner);
}

struct Unnamed {
  Shape shape = Shape::Round;
  float scale = 1;
};
void describe_fields(Unnamed& options, ddp::FieldVisitor& visitor) {
  // error: or a vector of int64_t, double or std::string; an enumeration needs names
  visitor.field({.name = "shape", .doc = "d"}, options.shape);
  // error: or a vector of int64_t, double or std::string; an enumeration needs names
  visitor.field({.name = "scale", .doc = "d"}, options.scale);
}

struct Declared {};
struct Read {};

}  // namespace

ddp::Section declare_wrong_section() {
  // error: define void describe_fields(T&, ddp::FieldVisitor&) in the namespace of the settings
  return ddp::declare_section<Declared>("declared");
}

Read read_wrong_section(const ddp::Config& config) {
  // error: define void describe_fields(T&, ddp::FieldVisitor&) in the namespace of the settings
  return config.section<Read>("read");
}

ddp::Section declare_sections_that_compile() {
  ddp::declare_section<Nested>("nested");
  return ddp::declare_section<Unnamed>("unnamed");
}
