// SPDX-License-Identifier: Apache-2.0
// Is this cluster fit for training? See kUsage.
#include <torch/torch.h>

#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <string>

#include "ddp/core/error.hpp"
#include "ddp/train/command_line.hpp"
#include "report.hpp"
#include "run.hpp"
#include "thresholds.hpp"
#include "train/answers.hpp"
#include "train/trace.hpp"

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
                           at four sizes, 100 training steps
  --write-thresholds FILE  writes thresholds that this run passes, apart from fixed requirements
  device=auto|cpu|cuda
  thresholds=auto          auto: the shipped set of this GPU (a100, h100, h200) or of the CPU (cpu);
                           or the name of a set, none, or a YAML file
  output=runs/cluster_check  folder of report.json and report.html; empty: none

Rank 0 prints a table and names each failed row with its GPU and node. n/a: this host, container or
device cannot tell. Exit code: 0 all thresholds are met, 1 a row failed, 64 wrong arguments.
--version prints the versions of libddp and of the libraries it uses.
)";

[[noreturn]] void refuse(const std::string& argument, const std::string& why) {
  throw ddp::SettingsError("cluster_check: " + argument + ": " + why + "; see --help");
}

void read_key(Options& options, const std::string& argument) {
  const auto equals = argument.find('=');
  const auto key = argument.substr(0, equals);
  const auto value = equals == std::string::npos ? "" : argument.substr(equals + 1);
  static const std::map<std::string, ddp::DeviceChoice> devices = {
      {"auto", ddp::DeviceChoice::Auto},
      {"cpu", ddp::DeviceChoice::Cpu},
      {"cuda", ddp::DeviceChoice::Cuda}};
  if (equals == std::string::npos) {
    refuse(argument, "unknown argument");
  } else if (key == "device") {
    if (!devices.contains(value)) {
      refuse(argument, "device is auto, cpu or cuda");
    }
    options.device = devices.at(value);
  } else if (key == "thresholds") {
    options.thresholds = value;
  } else if (key == "output") {
    options.output = value;
  } else {
    refuse(argument, "unknown key; there are device, thresholds and output");
  }
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--quick") {
      options.quick = true;
    } else if (argument == "--write-thresholds") {
      if (i + 1 == argc) {
        refuse(argument, "a file must follow");
      }
      options.write_thresholds = argv[++i];
    } else {
      read_key(options, argument);
    }
  }
  return options;
}

void write_file(const std::string& path, const std::string& text) {
  std::error_code ignored;  // the stream reports it
  const auto folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) {
    std::filesystem::create_directories(folder, ignored);
  }
  std::ofstream file(path);
  file << text << std::flush;
  if (!file) {
    throw ddp::WriteError("cluster_check: cannot write " + path +
                          "; fix: output=FOLDER or --write-thresholds FILE in a writable folder");
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

/// On rank 0: judges, prints and writes the report. Returns the exit code.
int finish(Run& run) {
  const auto& options = run.options;
  auto& report = run.report;
  const auto thresholds = Thresholds::load(options.thresholds, run.gpu_name);
  report.thresholds = thresholds.name();
  report.versions = ddp::detail::version_text();
  thresholds.judge(report);
  std::cout << to_table(report) << '\n';
  const auto failures = failures_of(report);
  for (const auto& sentence : failures) {
    std::cout << "FAILED " << sentence << '\n';
  }
  if (failures.empty()) {
    std::cout << "all checks passed";
  } else {
    std::cout << failures.size() << (failures.size() == 1 ? " row" : " rows") << " failed";
  }
  std::cout << " in " << format_number(report.seconds) << " s; thresholds: " << report.thresholds
            << std::endl;
  if (!options.output.empty()) {
    write_file(options.output + "/report.json", to_json(report));
    write_file(options.output + "/report.html", to_html(report));
    std::cout << "wrote " << options.output << "/report.json and report.html" << std::endl;
  }
  if (!options.write_thresholds.empty()) {
    write_file(options.write_thresholds, make_thresholds(report, thresholds));
    std::cout << "wrote " << options.write_thresholds << std::endl;
  }
  return failures.empty() ? 0 : 1;
}

int check(const Options& options) {
  const auto begin = std::chrono::steady_clock::now();
  Thresholds::load(options.thresholds, "");  // refuses a wrong file before anything runs
  ddp::ContextOptions context_options;
  context_options.device = options.device;
  auto context = ddp::Context::create(context_options);
  const auto bus_id = ddp::detail::pci_bus_id(context.device());
  const auto gpu = bus_id.empty() ? nullptr : ddp::detail::GpuMonitor::open(bus_id);
  Run run{.context = context, .options = options, .gpu = gpu.get()};
  run.gpu_name = name_of(context.device());
  run.report.started = utc_now();
  run.report.quick = options.quick;
  check_health(run);
  check_gpu_speed(run);
  check_collectives(run);
  check_training(run);
  gather_report(run);
  std::string code = "0";
  if (context.is_main()) {
    run.report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    try {
      code = std::to_string(finish(run));
    } catch (const ddp::Error& error) {
      std::cerr << error.what() << '\n';
      code = std::to_string(static_cast<int>(error.exit_code()));
    }
  }
  code = context.control_plane().broadcast(code);
  context.close();
  return std::stoi(code);
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
  } catch (const ddp::Error& error) {
    std::cerr << error.what() << '\n';
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
