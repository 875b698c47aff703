// SPDX-License-Identifier: Apache-2.0
#include "core/before_unwind.hpp"

#ifdef __GLIBCXX__

#include <typeinfo>

namespace ddp::detail {

// Not in an unnamed namespace: the variable below must be visible to the linker.
class UnwindFilterTypeInfo final : public std::type_info {
 public:
  UnwindFilterTypeInfo() : std::type_info("N3ddp6detail12UnwindFilterE") {}

  // Asked in the first phase of the two-phase unwinding of the Itanium C++ ABI ("search"), on top
  // of the stack of the throw. A `true` would make this handler the target; it never is.
  bool __do_catch(const std::type_info* thrown_type, void** thrown, unsigned outer) const override {
    void* object = *thrown;
    const bool is_std =
        object != nullptr && typeid(std::exception).__do_catch(thrown_type, &object, outer);
    show_to_observer(is_std ? static_cast<const std::exception*>(object) : nullptr);
    return false;
  }
};

// Stands where the compiler looks for UnwindFilter's type information: the class has no key
// function anywhere, so the compiler makes none. Its own file, for no file may see both as
// definitions.
extern const UnwindFilterTypeInfo unwind_filter_type_info __asm__(
    "_ZTIN3ddp6detail12UnwindFilterE");
const UnwindFilterTypeInfo unwind_filter_type_info;

}  // namespace ddp::detail

#endif
