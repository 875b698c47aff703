// SPDX-License-Identifier: Apache-2.0
#include "core/control/failure/first_failure.hpp"

#include <algorithm>
#include <exception>
#include <vector>

#include "core/control/wire/control_channel.hpp"
#include "core/control/wire/message_codec.hpp"
#include "core/launch/training_state.hpp"
#include "ddp/core/logging.hpp"

namespace ddp {

namespace {

constexpr std::size_t kMaxWhereBytes = 4096;
constexpr std::size_t kMaxMessageBytes = 65536;

}  // namespace

std::string detail::step_words(int64_t step) {
  return step >= 0              ? concat(" at step ", step)
         : step == kUnknownStep ? " at an unknown step (call Context::set_progress)"
                                : " before the first step";
}

std::string detail::place_words(int64_t step, const std::string& where) {
  return concat(step_words(step), where.empty() ? "" : " in " + where);
}

std::string detail::rank_words(int64_t rank, const std::string& host) {
  return concat("rank ", rank, host.empty() ? "" : " (" + host + ")");
}

bool FailureCause::is_valid() const {
  const int code = static_cast<int>(exit_code);
  return code >= 1 && code <= 255 && host.size() <= detail::kMaxHostBytes &&
         where.size() <= kMaxWhereBytes && message.size() <= kMaxMessageBytes;
}

std::string FailureCause::to_line() const {
  if (rank < 0) {
    return generation == 0 ? message : concat("generation ", generation, ": ", message);
  }
  return concat(detail::rank_words(rank, host),
                generation == 0 ? "" : concat(" of generation ", generation), " failed",
                detail::place_words(step, where), ": ", message);
}

namespace detail {

FailureCause with_failing_code(FailureCause cause) {
  const int code = static_cast<int>(cause.exit_code) & 0xff;
  cause.exit_code = code == 0 ? ExitCode::UserException : static_cast<ExitCode>(code);
  return cause;
}

bool FirstFailure::set(const FailureCause& cause) {
  const std::lock_guard lock(mutex_);
  if (cause_) {
    return false;
  }
  cause_ = with_failing_code(cause);
  cause_->generation = generation_;
  return true;
}

bool FirstFailure::failed() const {
  const std::lock_guard lock(mutex_);
  return cause_.has_value();
}

FailureCause FirstFailure::get() const {
  const std::lock_guard lock(mutex_);
  return cause_.value_or(FailureCause{});
}

bool FirstFailure::callbacks_ran() const {
  const std::lock_guard lock(mutex_);
  return ran_;
}

void FirstFailure::call(const std::function<void(const FailureCause&)>& callback) const {
  try {
    callback(get());
  } catch (const std::exception& error) {
    log_error(concat("a failure callback failed: ", error.what()));
  }
}

int FirstFailure::add_callback(std::function<void(const FailureCause&)> callback) {
  const std::lock_guard lock(callbacks_mutex_);
  const int token = next_token_++;
  if (callbacks_ran()) {
    call(callback);
  } else {
    callbacks_.emplace(token, std::move(callback));
  }
  return token;
}

void FirstFailure::remove_callback(int token) {
  const std::lock_guard lock(callbacks_mutex_);
  callbacks_.erase(token);
}

void FirstFailure::remove_callbacks() {
  const std::lock_guard lock(callbacks_mutex_);
  callbacks_.clear();
}

void FirstFailure::run_callbacks() {
  const std::lock_guard lock(callbacks_mutex_);
  {
    const std::lock_guard state_lock(mutex_);
    ran_ = true;
  }
  // Newest first: callbacks of the whole job are the slowest, because a communicator's abort waits
  // for its device. They must not delay the newer deadline that bounds them. One is taken out at a
  // time, because a callback may remove itself or others.
  while (!callbacks_.empty()) {
    const auto newest = std::prev(callbacks_.end());
    const auto callback = std::move(newest->second);
    callbacks_.erase(newest);
    call(callback);
  }
}

void refuse_while_unwinding(const char* operation) {
  if (std::uncaught_exceptions() > 0) [[unlikely]] {
    throw Error(
        ExitCode::UserException,
        concat(operation,
               ": a destructor called it while an exception unwinds, and the other ranks do "
               "not know of the exception yet; fix: skip the call while "
               "std::uncaught_exceptions() is above 0"));
  }
}

ExitCode exit_code_of(const std::exception& exception) {
  const auto* error = dynamic_cast<const Error*>(&exception);
  return error == nullptr ? ExitCode::UserException : error->exit_code();
}

void throw_failure(const FailureCause& cause) {
  const std::string line = cause.to_line();
  switch (cause.exit_code) {
    case ExitCode::Settings:
      throw SettingsError(line);
    case ExitCode::Data:
      throw DataError(line);
    case ExitCode::Mismatch:
      throw MismatchError(line);
    case ExitCode::CannotWrite:
      throw WriteError(line);
    case ExitCode::CannotRead:
      throw ReadError(line);
    case ExitCode::PeerLost:
      throw PeerLostError(line);
    case ExitCode::SavedRequeue:
      throw Stop(line);
    case ExitCode::Ok:
    case ExitCode::UserException:
      break;
  }
  throw Error(cause.exit_code, line);
}

std::string encode_cause(FailureCause cause) {
  cause.host.resize(std::min(cause.host.size(), kMaxHostBytes));
  cause.where.resize(std::min(cause.where.size(), kMaxWhereBytes));
  cause.message.resize(std::min(cause.message.size(), kMaxMessageBytes));
  return encode_message(cause);
}

}  // namespace detail
}  // namespace ddp
