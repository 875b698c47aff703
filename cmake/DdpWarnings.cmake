# SPDX-License-Identifier: Apache-2.0
# Warnings and sanitizers for our own targets; headers of others are SYSTEM and stay silent.
add_library(ddp_warnings INTERFACE)
target_compile_options(ddp_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual>)
# GCC 12 warns falsely about `"text" + std::string` (its bug 105651).
target_compile_options(ddp_warnings INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>)
# GCC 13 warns falsely about std::vector<bool>::reserve, which LibTorch's headers call.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  target_compile_options(ddp_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds -Wno-stringop-overflow>)
endif()
if(DDP_WARNINGS_AS_ERRORS)
  target_compile_options(ddp_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(DDP_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${DDP_SANITIZE}>
    $<$<COMPILE_LANGUAGE:C,CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=${DDP_SANITIZE})
endif()
