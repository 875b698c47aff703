// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/run.hpp"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <csignal>
#include <cstdlib>
#include <optional>
#include <thread>

#include "comm/job/context_handle.hpp"
#include "core/control/failure/failure_cause.hpp"
#include "core/control/failure/failure_policy.hpp"
#include "core/control/failure/failure_watch.hpp"
#include "core/control/failure/first_failure.hpp"
#include "core/log/error_text.hpp"
#include "core/settings/command_line.hpp"
#include "core/settings/setting_row.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/stop_signal.hpp"
#include "train/checkpoint/save_history.hpp"
#include "train/program/help_version.hpp"
#include "train/program/stop_before_training.hpp"
#include "train/program/unused_settings.hpp"

namespace ddp {
namespace {

// A broken collective may surface before the control plane has the cause, which is more precise.
constexpr std::chrono::milliseconds kCauseWait{300};

// The reader of this program's output may exit early (`prog | head`): writes then fail, and
// training continues. Never restored, because stdout's buffer is written at exit.
void ignore_broken_pipes() {
  struct sigaction action = {};
  if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) {
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, nullptr);
  }
}

void apply(const TrainOptions& options) {
  auto& torch_settings = at::globalContext();
  if (options.deterministic) {
    // cuBLAS reads it when a handle is made; without it LibTorch refuses products on CUDA.
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  }
  torch_settings.setDeterministicAlgorithms(options.deterministic, /*warn_only=*/false);
  torch_settings.setDeterministicCuDNN(options.deterministic);
  torch_settings.setBenchmarkCuDNN(options.cudnn_benchmark && !options.deterministic);
  torch_settings.setAllowTF32CuBLAS(options.allow_tf32);  // cuDNN's stays at PyTorch's default: on
}

// Every rank compares with rank 0's settings and receives all differences, so all ranks fail with
// the same error.
void require_equal_settings(const Context& context, const Config& config) {
  if (context.world_size() == 1) {
    return;
  }
  auto& plane = context.control_plane();
  const std::string own = config.to_canonical();
  const auto differences =
      plane.all_gather(first_difference(own, plane.broadcast(own)).substr(0, 1000));
  for (std::size_t rank = 0; rank < differences.size(); ++rank) {
    if (!differences[rank].empty()) {
      throw MismatchError(concat("rank ", rank,
                                 " has other settings than rank 0: ", differences[rank],
                                 " (rank 0); fix: give all ranks the same settings"));
    }
  }
}

bool wait_for_cause(const ControlPlane& plane) {
  const auto deadline = std::chrono::steady_clock::now() + kCauseWait;
  while (!plane.failed() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return plane.failed();
}

// nullptr: an exception of another type than std::exception.
void publish(ControlPlane& plane, const std::exception* exception) {
  FailureCause cause;
  cause.message =
      exception == nullptr ? "an exception of unknown type" : detail::message_of(*exception);
  cause.exit_code =
      exception == nullptr ? ExitCode::UserException : detail::exit_code_of(*exception);
  if (exception != nullptr) {
    cause.message += detail::log_frames(*exception);
  }
  if (const auto* save = dynamic_cast<const detail::SaveFailure*>(exception)) {
    cause = save->cause();  // all ranks throw it; whichever is first, the same rank is to blame
  }
  if (cause.exit_code == ExitCode::PeerLost && wait_for_cause(plane)) {
    return;
  }
  plane.publish_failure(cause);
}

void log_start(const Context& context) {
  if (context.is_main()) {
    log_info(concat(context.world_size(), context.world_size() == 1 ? " rank" : " ranks", " on ",
                    context.num_nodes(), context.num_nodes() == 1 ? " node (" : " nodes (",
                    context.launcher(), "), ", context.device().str(), ", ",
                    context.communicator()->backend()));
  }
}

// The run folder and the checkpoints store all settings.
void log_settings(const Context& context, const Config& config, const CommandLine& line) {
  if (!context.is_main()) {
    return;
  }
  for (const std::string& repeated : repeated_overrides(line)) {
    log_warning(repeated);
  }
  const bool all = line.show_settings;
  const std::string table = all ? config.to_table() : config.to_changed_table();
  if (table.empty()) {
    log_info("all settings have their defaults; --show-settings lists them");
    return;
  }
  const char* title =
      all ? "settings; * is not the default\n" : "changed settings; --show-settings lists all\n";
  log_info(title + table.substr(0, table.size() - 1));  // without the last line break
}

void train(Context& context, const Config& config, const RunFunction& function,
           detail::FirstStepCheck& check) {
  log_start(context);
  require_equal_settings(context, config);
  function(context, config);
  detail::ContextHandle(context).throw_deferred_failure();
  check.end_run();
  if (context.is_main() && config.metrics.usage.is_set() && !check.trained_or_evaluated()) {
    log_warning(concat(
        "the program ended without a training step (train.epochs=", config.train.epochs.unmarked(),
        ", train.max_steps=", config.train.max_steps.unmarked(),
        "); fix: set train.epochs, or loop over cfg.train.num_steps(...)"));
  }
}

// Returns this rank's own code.
ExitCode run_in_context(Context& context, const Config& config, const RunFunction& function,
                        detail::FirstStepCheck& check) {
  try {
    train(context, config, function, check);
    return ExitCode::Ok;
  } catch (const Stop& stop) {
    if (context.is_main()) {
      log_info(stop.what());
    }
    return ExitCode::SavedRequeue;
  } catch (const std::exception& exception) {
    publish(context.control_plane(), &exception);
    return detail::exit_code_of(exception);
  } catch (...) {
    publish(context.control_plane(), nullptr);
    return ExitCode::UserException;
  }
}

ExitCode run_job(const Config& config, const RunFunction& function) {
  detail::FirstStepCheck check(config);
  detail::StopBeforeTraining early_stop;
  std::optional<Context> context(Context::create(config.context));
  detail::FailureWatch watch(context->control_plane());
  early_stop.watch(context->control_plane());
  const ExitCode own = run_in_context(*context, config, function, check);
  early_stop.finish();
  watch.detach();
  // Asked once, and after everything else: a peer may fail when this rank has finished its work.
  if (const auto end = detail::job_end_of(context->control_plane())) {
    context.reset();  // peers have the cause; no wait for them
    return end->exit_code;
  }
  if (own == ExitCode::Ok || own == ExitCode::SavedRequeue) {
    context->close();  // throws the cause of a peer that fails meanwhile
  }
  return own;
}

}  // namespace

int run(int argc, const char* const* argv, const RunFunction& function,
        const std::vector<Section>& sections) {
  ExitCode code = ExitCode::UserException;
  ignore_broken_pipes();
  try {
    const CommandLine line = parse_command_line(argc, argv);
    if (detail::print_help_or_version(line, program_name(argc, argv), sections)) {
      return 0;
    }
    const StopSignalHandlers handlers;
    const Config config = Config::from_command_line(argc, argv, sections);
    apply(config.train);
    code = run_job(config, [&](Context& context, const Config& agreed) {
      log_settings(context, agreed, line);
      function(context, agreed);
    });
  } catch (const std::exception& exception) {
    log_error(detail::message_of(exception) + detail::log_frames(exception));
    code = detail::exit_code_of(exception);
  }
  return static_cast<int>(code);
}

}  // namespace ddp
