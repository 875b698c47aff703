// SPDX-License-Identifier: Apache-2.0
// Errors a user can cause. Each has the exit code with which `ddp::run` ends the process.
#pragma once

#include <stdexcept>
#include <string>

#include "ddp/detail/text.hpp"

namespace ddp {

/// Exit codes of a process; an sbatch script decides by them.
enum class ExitCode : int {
  Ok = 0,
  UserException = 1,  ///< any other exception (of the program, LibTorch, CUDA or libddp itself),
                      ///< or a stop without checkpoint.dir
  Settings = 64,      ///< a setting, argument, environment variable or use of the library is wrong
  Data = 65,          ///< a data file is missing, truncated or corrupt
  Mismatch = 70,      ///< ranks disagree about model or settings; a checkpoint of another model;
                      ///< training diverged (NonFiniteError)
  CannotWrite = 73,   ///< output cannot be written
  CannotRead = 74,    ///< a checkpoint cannot be read
  SavedRequeue = 75,  ///< stopped on request, state saved: requeue the job
  PeerLost = 76,      ///< a peer vanished without an error message
};

/// Base of all errors caused by a user's mistake or the environment. The message names the setting
/// (or file), its value, the limit and the fix.
class Error : public std::runtime_error {
 public:
  /// `message` is what() and the last line that users read.
  Error(ExitCode exit_code, const std::string& message)
      : std::runtime_error(message), exit_code_(exit_code) {}
  ExitCode exit_code() const noexcept { return exit_code_; }  ///< returned by ddp::run

 private:
  ExitCode exit_code_;
};

struct SettingsError : Error {
  explicit SettingsError(const std::string& message) : Error(ExitCode::Settings, message) {}
};
struct DataError : Error {
  explicit DataError(const std::string& message) : Error(ExitCode::Data, message) {}
};
struct MismatchError : Error {
  explicit MismatchError(const std::string& message) : Error(ExitCode::Mismatch, message) {}
};
struct WriteError : Error {
  explicit WriteError(const std::string& message) : Error(ExitCode::CannotWrite, message) {}
};
struct ReadError : Error {
  explicit ReadError(const std::string& message) : Error(ExitCode::CannotRead, message) {}
};
struct PeerLostError : Error {
  explicit PeerLostError(const std::string& message) : Error(ExitCode::PeerLost, message) {}
};
/// Not a failure: the ranks agreed to stop and saved. ddp::run returns 75.
struct Stop : Error {
  explicit Stop(const std::string& message) : Error(ExitCode::SavedRequeue, message) {}
};

/// A bug in libddp.
struct InternalError : std::logic_error {
  using std::logic_error::logic_error;
};

/// Joins its arguments with operator<<, for messages. Numbers do not depend on the locale.
template <typename... Args>
std::string concat(const Args&... args) {
  detail::TextStream out;
  (out << ... << args);
  return out.str();
}

}  // namespace ddp
