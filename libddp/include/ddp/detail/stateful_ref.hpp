// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "ddp/core/state_dict.hpp"
#include "ddp/core/fields.hpp"

namespace ddp {

/// An object of a Checkpointer: a Stateful object, a smart pointer to one (SettingsError if it is
/// empty), or a name and one of these.
class StatefulRef {
 public:
  StatefulRef(Stateful& object) : StatefulRef("", &object) {}
  template <typename Pointer>
  requires requires(Pointer& pointer) { static_cast<Stateful*>(pointer.get()); }
  StatefulRef(Pointer& pointer) : StatefulRef("", pointer.get()) {}
  StatefulRef(const std::string& name, StatefulRef object) : StatefulRef(name, object.object_) {}

  Stateful& get() const { return *object_; }
  /// The object's name in a checkpoint: the name given here, else state_name().
  std::string name() const { return name_.empty() ? object_->state_name() : name_; }

 private:
  StatefulRef(const std::string& name, Stateful* object);

  Stateful* object_;
  std::string name_;
};

}  // namespace ddp
