// SPDX-License-Identifier: Apache-2.0
// Messages and C++ stack frames of exceptions.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <vector>

namespace ddp::detail {

/// what(), of LibTorch's errors without the backtrace.
inline std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error == nullptr ? error.what() : torch_error->what_without_backtrace();
}

struct ErrorFrame {
  std::string function;  ///< demangled; empty if unknown
  std::string place;     ///< "net.hpp:42", or the file of the program or library
};

/// The frames of a LibTorch error, innermost first. The program's own functions need no exported
/// symbols. They have lines if they were compiled with -g. Returns nothing for other formats of the
/// backtrace, such as Python's.
std::vector<ErrorFrame> frames_of(const c10::Error& error);

/// Whether log_frames() prints: TORCH_SHOW_CPP_STACKTRACES=1 or DDP_LOG_LEVEL=debug.
bool shows_frames();

/// Prints the frames of `error`, or of the LibTorch error nested in it, on this rank only. Returns
/// a sentence about shows_frames() for the end of a message if there are frames and it is false,
/// else nothing.
std::string log_frames(const std::exception& error);

}  // namespace ddp::detail
