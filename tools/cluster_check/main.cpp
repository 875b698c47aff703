// SPDX-License-Identifier: Apache-2.0
// Is this cluster fit for training? See kUsage.
#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "comm/job/cuda_device.hpp"
#include "core/control/wire/message_codec.hpp"
#include "core/files/file_ops.hpp"
#include "core/settings/settings.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/text.hpp"
#include "ddp/train/command_line.hpp"
#include "report.hpp"
#include "run.hpp"
#include "thresholds.hpp"
#include "train/program/help_version.hpp"
#include "train/trace/trace.hpp"

#if DDP_HAS_CUDA
#include <ATen/cuda/CUDAContext.h>
#endif

namespace cluster_check {
namespace {

constexpr const char* kUsage =
    R"(usage: cluster_check [--quick] [--write-thresholds FILE] [key=value...]

Is this cluster fit for training? Checks the health of each node and GPU, the speed of each GPU,
collectives over all GPUs, and training. Start it like a trainer, one rank per GPU:

  build/examples/cluster_check
  mpirun -n 8 build/examples/cluster_check
  torchrun --no-python --nproc-per-node=8 build/examples/cluster_check
  srun --mpi=pmix build/examples/cluster_check
  sbatch --nodes=4 slurm/cluster_check.sbatch

  --quick                  half a minute: health, one matrix product, the device's copy, all-reduce
                           at four sizes, 100 training steps (CPU: 20)
  --write-thresholds FILE  writes thresholds that this run passes, apart from fixed requirements
  device=auto|cpu|cuda     short for context.device=
  context.KEY=VALUE        a setting of the trainers' section context (docs/configuration.md)
  thresholds=auto          auto: the shipped set of this GPU (a100, h100, h200) or of the CPU (cpu);
                           or the name of a set, none (no threshold), or a YAML file
  output=runs/cluster_check  folder of report.json; empty: none. tools/plot_check.py makes its page

Rank 0 prints a table and names each failed row with its GPU and node. n/a: this host, container or
device cannot tell. Exit code: 0 no row failed, 1 a row failed, 64 wrong arguments, 70 the check
itself failed, 73 an output cannot be written, 76 a rank was lost.
--version prints the versions of libddp and of the libraries it uses.
)";

[[noreturn]] void refuse(const std::string& argument, const std::string& why) {
  throw ddp::SettingsError("cluster_check: " + argument + ": " + why + "; see --help");
}

/// Messages of the library name settings of section context, so `context` takes all of them.
void read_key(Options& options, ddp::Settings& context, const std::string& argument) {
  const auto equals = argument.find('=');
  const auto key = argument.substr(0, equals);
  const auto value = equals == std::string::npos ? "" : argument.substr(equals + 1);
  if (equals == std::string::npos) {
    refuse(argument, "unknown argument");
  } else if (key == "device") {
    if (value != "auto" && value != "cpu" && value != "cuda") {
      refuse(argument, "device is auto, cpu or cuda");
    }
    context.add_override("context." + argument);
  } else if (key.starts_with("context.")) {
    context.add_override(argument);
  } else if (key == "thresholds") {
    options.thresholds = value;
  } else if (key == "output") {
    options.output = value;
  } else {
    refuse(argument, "unknown key; there are device, context.…, thresholds and output");
  }
}

Options parse(int argc, char** argv) {
  Options options;
  ddp::Settings context;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--quick") {
      options.quick = true;
    } else if (argument == "--write-thresholds") {
      const std::string file = i + 1 < argc ? argv[++i] : "";
      if (file.empty() || file.starts_with('-')) {
        refuse(argument, "a file must follow");
      }
      options.write_thresholds = file;
    } else {
      read_key(options, context, argument);
    }
  }
  context.read("context", options.context);
  return options;
}

/// Such as /dev/stdout, which must not be replaced by a file.
bool is_device(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored) && !std::filesystem::is_regular_file(path, ignored);
}

/// A pipe that nobody reads is an error: the check must not wait for a reader.
void write_to_device(const std::string& path, const std::string& text) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  bool is_written = fd >= 0 && ::fcntl(fd, F_SETFL, 0) == 0;  // waits for a reader that is slow
  for (std::size_t done = 0; is_written && done < text.size();) {
    const ssize_t count = ::write(fd, text.data() + done, text.size() - done);
    is_written = count > 0 || (count < 0 && errno == EINTR);
    done += static_cast<std::size_t>(std::max<ssize_t>(count, 0));
  }
  const int error = errno;
  if (fd >= 0) {
    ::close(fd);
  }
  if (!is_written) {
    throw ddp::WriteError(ddp::concat("cluster_check: --write-thresholds: cannot write ", path,
                                      ": ", std::generic_category().message(error),
                                      "; fix: name a file, or a pipe that somebody reads"));
  }
}

/// `setting` names the path in an error. Replaces what stands there, and never writes into it.
void write_file(const std::string& setting, const std::string& path, const std::string& text) {
  try {
    std::error_code ignored;  // replace_file reports it
    const auto folder = std::filesystem::path(path).parent_path();
    if (!folder.empty()) {
      std::filesystem::create_directories(folder, ignored);
    }
    ddp::replace_file(ddp::system_file_ops(), path, {text});
  } catch (const ddp::WriteError& error) {
    throw ddp::WriteError(ddp::concat("cluster_check: ", setting, ": cannot write ", path, ": ",
                                      error.what(), "; fix: choose a writable folder"));
  }
}

void write_thresholds(const std::string& path, const std::string& text) {
  if (is_device(path)) {
    write_to_device(path, text);
  } else {
    write_file("--write-thresholds", path, text);
  }
}

/// Finds paths that cannot be written before minutes of checks, and removes report and page of an
/// earlier run: a run that dies must not leave them as its own.
void prepare_outputs(const Options& options) {
  if (!options.output.empty()) {
    write_file("output=" + options.output, options.output + "/report.json", "");
    for (const char* name : {"/report.json", "/report.html"}) {
      std::error_code ignored;  // a page that cannot be removed is no reason to stop
      std::filesystem::remove(options.output + name, ignored);
    }
  }
  if (!options.write_thresholds.empty() && !is_device(options.write_thresholds)) {
    const auto trial = options.write_thresholds + ".trial";
    write_file("--write-thresholds", trial, "");
    std::filesystem::remove(trial);
  }
}

std::string utc_now() {
  const auto now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32] = "";
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &parts);
  return text;
}

/// Empty for a CPU.
std::string name_of([[maybe_unused]] at::Device device) {
#if DDP_HAS_CUDA
  if (device.is_cuda()) {
    return at::cuda::getDeviceProperties(device.index())->name;
  }
#endif
  return "";
}

/// "NCCL_NVLS_ENABLE=0": such variables change what the collectives measure.
std::vector<std::string> nccl_variables() {
  std::vector<std::string> found;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (std::string_view(*variable).starts_with("NCCL_")) {
      found.emplace_back(*variable);
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

/// On rank 0: judges, prints and writes the report. Returns the exit code.
int finish(Run& run, const Thresholds& thresholds) {
  const auto& options = run.options;
  auto& report = run.report;
  report.thresholds = thresholds.name();
  report.versions = ddp::detail::version_text();
  thresholds.judge(report);
  std::cout << ddp::detail::printable(to_table(report)) << '\n';
  const auto failures = failures_of(report);
  for (const auto& sentence : failures) {
    std::cout << "FAILED " << ddp::detail::printable(sentence) << '\n';
  }
  std::cout << verdict_of(report) << "\n"
            << format_number(report.seconds) << " s; thresholds: " << report.thresholds
            << std::endl;
  int code = failures.empty() ? 0 : 1;
  const auto write = [&](const auto& what, const std::string& wrote) {
    try {
      what();
      std::cout << "wrote " << ddp::detail::printable(wrote) << std::endl;
    } catch (const ddp::WriteError& error) {
      std::cerr << ddp::detail::printable(error.what()) << '\n';
      code = code == 0 ? static_cast<int>(error.exit_code()) : code;
    }
  };
  if (!options.output.empty()) {
    const auto path = options.output + "/report.json";
    write([&] { write_file("output=" + options.output, path, to_json(report)); }, path);
  }
  if (!options.write_thresholds.empty()) {
    write([&] { write_thresholds(options.write_thresholds, make_thresholds(report, thresholds)); },
          options.write_thresholds);
  }
  return code;
}

/// Prints the error and returns its exit code. 1 would mean that a row failed.
int explain(const std::exception& error) {
  std::cerr << ddp::detail::printable(error.what()) << std::endl;
  const auto* known = dynamic_cast<const ddp::Error*>(&error);
  const auto code = known != nullptr ? known->exit_code() : ddp::ExitCode::UserException;
  return static_cast<int>(code == ddp::ExitCode::UserException ? ddp::ExitCode::Mismatch : code);
}

/// A node whose GPUs are gone must not pass as a CPU. The Context refuses what is certain, on all
/// ranks together. A check also refuses what only warns a training.
void refuse_lost_gpus(const Options& options) {
  const auto lost = ddp::detail::find_lost_gpus();
  if (options.context.device == ddp::DeviceChoice::Auto && lost && !lost->is_certain) {
    throw ddp::SettingsError("cluster_check: " + lost->message);
  }
}

/// Runs `work` on rank 0, and returns its exit code on all ranks.
int run_on_main(ddp::Context& context, const std::function<int()>& work) {
  int code = 0;
  if (context.is_main()) {
    try {
      code = work();
    } catch (const std::exception& error) {
      code = explain(error);
    }
  }
  return ddp::detail::broadcast_message(context.control_plane(), code);
}

int check(const Options& options) {
  const auto begin = std::chrono::steady_clock::now();
  auto thresholds =
      Thresholds::load(options.thresholds, "");  // refuses a wrong file before anything runs
  refuse_lost_gpus(options);
  auto context = ddp::Context::create(options.context);
  const auto bus_id = ddp::detail::pci_bus_id(context.device());
  const auto gpu = bus_id.empty() ? nullptr : ddp::detail::GpuMonitor::open(bus_id);
  Run run{.context = context, .options = options, .gpu = gpu.get()};
  run.gpu_name = name_of(context.device());
  const int prepared = run_on_main(context, [&] {
    if (options.context.device == ddp::DeviceChoice::Auto && !run.on_gpu()) {
      std::cerr << "warning: no GPU is visible, so only the CPU is checked; device=cuda makes "
                   "this an error"
                << std::endl;
    }
    prepare_outputs(options);
    return 0;
  });
  if (prepared != 0) {
    context.close();
    return prepared;
  }
  if (options.thresholds == "auto") {
    thresholds = Thresholds::load("auto", run.gpu_name);
  }
  run.report.nccl = nccl_variables();
  run.report.started = utc_now();
  run.report.quick = options.quick;
  check_health(run);
  check_gpu_speed(run);
  check_collectives(run);
  check_training(run);
  gather_report(run);
  run.report.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const int code = run_on_main(context, [&] { return finish(run, thresholds); });
  context.close();
  return code;
}

}  // namespace

void Run::begin(const std::string& part) {
  context.set_progress(0, part);
  if (context.is_main()) {
    std::cerr << "checking " << part << "..." << std::endl;
  }
}

}  // namespace cluster_check

int main(int argc, char** argv) {
  if (ddp::answer_command_line(argc, argv, cluster_check::kUsage)) {
    return 0;
  }
  try {
    return cluster_check::check(cluster_check::parse(argc, argv));
  } catch (const std::exception& error) {
    return cluster_check::explain(error);
  }
}
