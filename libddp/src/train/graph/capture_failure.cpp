// SPDX-License-Identifier: Apache-2.0
#include "train/graph/capture_failure.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "core/log/error_text.hpp"

namespace ddp::detail {
namespace {

// Strips the exceptions' own stack traces, which do not help a user.
std::string first_lines(std::string text) {
  text.resize(std::min(text.size(), text.find("Search for `cuda")));
  const auto second = text.find('\n', text.find('\n') + 1);
  text.resize(std::min(text.size(), std::min<size_t>(second, 300)));
  for (char& c : text) {
    c = c == '\n' ? ' ' : c;
  }
  while (!text.empty() && (text.back() == ' ' || text.back() == '.')) {
    text.pop_back();
  }
  return text;
}

// Names of the failing operations, innermost first. The thread that unwinds the exception adds
// them.
std::mutex names_mutex;
std::vector<std::string> failing_names;

constexpr size_t kMaxNames = 3;

}  // namespace

FailingOperation::FailingOperation() {
  {
    const std::lock_guard lock(names_mutex);
    failing_names.clear();
  }
  handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(nullptr, [](const at::RecordFunction& function,
                                             at::ObserverContext* /*context*/) {
        if (std::uncaught_exceptions() > 0) {
          const std::lock_guard lock(names_mutex);
          if (failing_names.size() < kMaxNames) {
            failing_names.emplace_back(function.name());
          }
        }
      }).scopes({at::RecordScope::FUNCTION}));
}

FailingOperation::~FailingOperation() {
  at::removeCallback(handle_);
}

std::string FailingOperation::names() const {
  const std::lock_guard lock(names_mutex);
  std::string text;
  for (const auto& name : failing_names) {
    text += (text.empty() ? "" : ", in ") + name;
  }
  return text;
}

std::string capture_failure(const std::exception_ptr& error, const std::string& operation) {
  const auto in = operation.empty() ? std::string() : operation + ": ";
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError& memory) {
    return in +
           "out of memory during the capture (a graph needs memory besides that of eager steps): " +
           first_lines(memory.what_without_backtrace()) +
           "; fix: use a smaller batch, or set train.cuda_graph=off";
  } catch (const c10::Error& torch) {
    log_frames(torch);
    const std::string text = torch.what_without_backtrace();
    const bool waits = text.find("captur") != std::string::npos;
    return in +
           (waits ? "it waits for the device, or calls something that cannot be captured: " : "") +
           first_lines(text);
  } catch (const std::exception& other) {
    return in + first_lines(other.what());
  }
}

}  // namespace ddp::detail
