// SPDX-License-Identifier: Apache-2.0
#include "core/log/error_text.hpp"

#include <torch/csrc/profiler/unwind/unwind.h>
#include <torch/csrc/utils/cpp_stacktraces.h>

#include <charconv>
#include <cstdint>
#include <string_view>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

std::string_view file_name(std::string_view path) {
  return path.substr(path.rfind('/') + 1);
}

// A line of LibTorch's text: "frame #3: FUNCTION + 0x9d (0x7f9154b7305d in FILE)".
struct Line {
  std::string_view function;  // empty if LibTorch does not know it
  std::string_view file;
  uintptr_t address = 0;
};

bool parse(std::string_view text, Line& line) {
  constexpr std::string_view kNumber = ": ", kOffset = " + 0x", kAddress = " (0x", kFile = " in ";
  const auto number = text.find(kNumber);
  const auto offset = text.rfind(kOffset);
  const auto address = text.rfind(kAddress);
  if (!text.starts_with("frame #") || number == text.npos || offset == text.npos ||
      address == text.npos || offset < number || !text.ends_with(')')) {
    return false;
  }
  const auto* const digits = text.data() + address + kAddress.size();
  const auto [end, error] = std::from_chars(digits, text.data() + text.size(), line.address, 16);
  const std::string_view rest(end, text.data() + text.size());
  if (error != std::errc() || !rest.starts_with(kFile)) {
    return false;
  }
  line.function = text.substr(number + kNumber.size(), offset - number - kNumber.size());
  if (line.function == "<unknown function>") {
    line.function = {};
  }
  line.file = rest.substr(kFile.size(), rest.size() - kFile.size() - 1);
  return true;
}

std::vector<Line> parse_lines(std::string_view text) {
  std::vector<Line> lines;
  while (!text.empty()) {
    const auto end = text.find('\n');
    Line line;
    if (parse(text.substr(0, end), line)) {
      lines.push_back(line);
    }
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
  }
  return lines;
}

// Symbols of LibTorch's large libraries take long to read, and its own text names what matters.
bool is_libtorch(const Line& line) {
  const auto name = file_name(line.file);
  return name.starts_with("libtorch") || name.starts_with("libc10");
}

// One frame for each address, empty if the symbols cannot be read.
std::vector<torch::unwind::Frame> read_symbols(const std::vector<void*>& addresses) {
  try {
    return torch::unwind::symbolize(addresses, torch::unwind::Mode::fast);
  } catch (const std::exception&) {
    return std::vector<torch::unwind::Frame>(addresses.size());
  }
}

const c10::Error* find_libtorch_error(const std::exception& error) {
  if (const auto* found = dynamic_cast<const c10::Error*>(&error)) {
    return found;
  }
  try {
    std::rethrow_if_nested(error);
  } catch (const std::exception& cause) {
    return find_libtorch_error(cause);  // `error` keeps it alive
  } catch (...) {
  }
  return nullptr;
}

}  // namespace

std::vector<ErrorFrame> frames_of(const c10::Error& error) {
  const auto& backtrace = error.backtrace();
  const std::string text = backtrace == nullptr ? "" : backtrace->get();
  const auto lines = parse_lines(text);
  std::vector<void*> unread;
  for (const auto& line : lines) {
    if (!is_libtorch(line)) {
      unread.push_back(reinterpret_cast<void*>(line.address));
    }
  }
  const auto symbols = read_symbols(unread);
  std::vector<ErrorFrame> frames;
  auto symbol = symbols.begin();
  for (const auto& line : lines) {
    ErrorFrame frame{std::string(line.function), std::string(file_name(line.file))};
    if (!is_libtorch(line)) {
      if (!symbol->funcname.empty() && symbol->funcname != "??") {
        frame.function = symbol->funcname;
      }
      // Without debug information the file is the program itself and the line an offset.
      if (!symbol->filename.empty() && file_name(symbol->filename) != frame.place) {
        frame.place = concat(symbol->filename, ':', symbol->lineno);
      }
      ++symbol;
    }
    frames.push_back(std::move(frame));
  }
  return frames;
}

bool shows_frames() {
  return is_logged(LogLevel::Debug) || torch::get_cpp_stacktraces_enabled();
}

std::string log_frames(const std::exception& error) {
  const auto* const torch_error = find_libtorch_error(error);
  if (torch_error == nullptr) {
    return "";
  }
  if (!shows_frames()) {
    return "; TORCH_SHOW_CPP_STACKTRACES=1 prints its C++ frames";
  }
  constexpr std::size_t kShown = 200;  // names of LibTorch's wrappers are several times longer
  std::string text;
  const auto frames = frames_of(*torch_error);
  for (std::size_t i = 0; i < frames.size(); ++i) {
    const auto& [function, place] = frames[i];
    text += concat("\n  #", i, ' ',
                   function.empty() ? "(unknown function)" : function.substr(0, kShown),
                   function.size() > kShown ? "…" : "", " in ", place);
  }
  const auto& backtrace = torch_error->backtrace();
  log_error(
      concat("C++ frames of this error, innermost first: ", torch_error->what_without_backtrace(),
             text.empty() && backtrace != nullptr ? "\n" + backtrace->get() : text));
  return "";
}

}  // namespace ddp::detail
