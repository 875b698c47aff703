// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/files/metrics_files.hpp"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/files/file_ops.hpp"
#include "ddp/core/error.hpp"
#include "train/metrics/files/metrics_writers.hpp"
#include "train/metrics/files/tensorboard_writer.hpp"
#include "train/metrics/ranks/rank_devices.hpp"

namespace ddp::detail {
namespace {

constexpr double kRanksPeriodSeconds = 1;

RunFolder make_folder(const MetricsOptions& options, const LaunchEnvironment& launch,
                      bool is_main) {
  if (!is_main || options.dir.empty()) {
    return {};
  }
  auto job_name = launch.job_id;
  std::replace(job_name.begin(), job_name.end(), '/', '_');
  const auto& name = !options.run_name.empty() ? options.run_name
                     : !job_name.empty()       ? job_name
                                               : time_name(options.dir);
  return {options.dir, name, launch.job_id};
}

// The batch of all ranks, 0 if unknown. A program may give its loaders another batch than the
// settings say, and evaluation has a loader of its own.
int64_t batch_of_loaders(const detail::ConfiguredRun& configured, int64_t ranks) {
  const auto batches = configured.loader.values();
  const int64_t by_settings = configured.global_batch_size > 0 ? configured.global_batch_size
                                                               : configured.batch_size * ranks;
  if (batches.contains(by_settings)) {
    return by_settings;
  }
  return batches.size() == 1 ? *batches.begin() : 0;
}

// What the program states, else what its used settings say.
RunInfo constants_of(const MetricsOptions& options, int64_t ranks) {
  auto run = options.run;
  const auto& configured = options.configured;
  if (run.precision.empty() && configured.amp.is_set()) {
    run.precision = configured.precision;
  }
  if (run.batch_size_per_rank == 0 && run.global_batch_size == 0) {
    run.global_batch_size = batch_of_loaders(configured, ranks) * configured.grad_accum_steps;
  }
  if (run.bucket_cap_mb == 0 && configured.ddp.is_set()) {
    run.bucket_cap_mb = configured.bucket_cap_mb;
  }
  return run;
}

std::string separated_by_spaces(std::string arguments) {
  while (arguments.ends_with('\0')) {
    arguments.pop_back();
  }
  std::replace(arguments.begin(), arguments.end(), '\0', ' ');
  return arguments;
}

// "LibTorch  2.11.0\n…" as name and rest of each line. Libraries that the build lacks are left out.
std::vector<std::pair<std::string, std::string>> named_lines(const std::string& text) {
  std::vector<std::pair<std::string, std::string>> lines;
  for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    const auto line = text.substr(begin, end - begin);
    const auto gap = line.find(' ');
    const auto value = line.find_first_not_of(' ', gap);
    if (value != std::string::npos && line.compare(value, 4, "none") != 0) {
      lines.emplace_back(line.substr(0, gap), line.substr(value));
    }
  }
  return lines;
}

std::string until_newline(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

std::string cpu_name(const std::string& cpuinfo) {
  const auto key = cpuinfo.find("model name");
  const auto value = cpuinfo.find(": ", key);
  return key == std::string::npos || value == std::string::npos
             ? ""
             : until_newline(cpuinfo.substr(value + 2));
}

std::string program_name(const std::string& arguments) {
  const auto path = arguments.substr(0, arguments.find('\0'));
  return path.substr(path.rfind('/') + 1);
}

MetricsFiles::MetricsFiles(const MetricsOptions& options, const LaunchEnvironment& launch,
                           bool is_main)
    : options_(options),
      launch_(launch),
      folder_(make_folder(options, launch, is_main)),
      is_main_(is_main),
      commit_(is_main ? read_git_commit(".") : ""),
      started_(unix_time()) {
  if (folder_.path().empty()) {
    return;
  }
  if (options.csv) {
    add_writer(std::make_shared<CsvWriter>(folder_));
  }
  if (options.jsonl) {
    add_writer(std::make_shared<JsonlWriter>(folder_));
  }
  if (options.tensorboard) {
    tensorboard_ = std::make_shared<TensorboardWriter>(folder_);
    add_writer(tensorboard_);
  }
}

void MetricsFiles::add_writer(std::shared_ptr<MetricsWriter> writer) {
  if (writer == nullptr) {
    throw SettingsError("add_writer: the pointer is empty; fix: give it a writer");
  }
  if (is_main_) {
    writer->begin(path(), options_.run.settings_text);
    writers_.push_back(std::move(writer));
  }
}

void MetricsFiles::write(const std::string& table, const Row& row) {
  for (const auto& writer : writers_) {
    writer->write(table, row);
  }
}

// A run that begins at step 0 also repeats the evaluation before the first step.
void MetricsFiles::begin(int64_t steps_done) {
  if (!path().empty() && !std::exchange(has_begun_, true)) {
    const int64_t first = steps_done > 0 ? steps_done + 1 : 0;
    remove_rows_from(folder_, "steps", "step", first);
    remove_rows_from(folder_, "evals", "step", first);
    if (tensorboard_ != nullptr) {
      tensorboard_->start(steps_done);
    }
  }
}

void MetricsFiles::add_step(const LoggedNumbers& numbers) {
  write("steps", step_row(numbers, unix_time()));
}

void MetricsFiles::write_ranks(int64_t step, int64_t max_steps,
                               const std::vector<RankNumbers>& ranks,
                               const std::vector<Straggler>& stragglers) {
  const double now = unix_time();
  if (now - ranks_written_ >= kRanksPeriodSeconds || step == max_steps) {
    ranks_written_ = now;
    folder_.write("ranks.json", ranks_json({.step = step,
                                            .max_steps = max_steps,
                                            .unix_time = now,
                                            .sample_unit = options_.run.sample_unit},
                                           ranks, stragglers));
  }
}

void MetricsFiles::add_evaluation(const EvaluationNumbers& evaluation) {
  Row row = {{.name = "step", .integer = evaluation.done},
             {.name = "epoch", .number = evaluation.epoch},
             {.name = "eval_loss", .number = evaluation.loss},
             {.name = "eval_accuracy", .number = evaluation.accuracy}};
  add_custom(row, evaluation.custom);
  row.push_back({.name = "time", .number = unix_time()});
  write("evals", row);
}

void MetricsFiles::add_epoch(const Epoch& epoch, const JobNumbers& job) {
  if (!path().empty() && !std::exchange(has_epochs_, true)) {
    remove_rows_from(folder_, "epochs", "epoch", epoch.epoch);
  }
  if (tensorboard_ != nullptr) {
    tensorboard_->set_step(epoch.steps_done);
  }
  write("epochs", epoch_row(epoch, job));
}

std::vector<std::string> MetricsFiles::columns_of_epochs() const {
  auto columns = column_names(epoch_row({}, JobNumbers(std::vector<RankNumbers>(1))));
  std::erase_if(columns, [](const std::string& column) { return column.starts_with("test_"); });
  return columns;
}

Row MetricsFiles::constants(const Place& place) const {
  const auto run = constants_of(options_, place.ranks);
  const int64_t batch =
      run.global_batch_size > 0 ? run.global_batch_size : run.batch_size_per_rank * place.ranks;
  const auto if_known = [](bool is_known, double number) {
    return is_known ? std::optional(number) : std::nullopt;
  };
  return {{.name = "job_id", .text = launch_.job_id},
          {.name = "commit", .text = commit_},
          {.name = "gpu_type", .text = place.gpu_type},
          {.name = "nodes", .integer = launch_.num_nodes},
          {.name = "gpus", .integer = place.uses_gpus ? place.ranks : 0},
          {.name = "ranks", .integer = place.ranks},
          {.name = "precision", .text = run.precision},
          {.name = "global_batch_size", .integer = batch > 0 ? std::optional(batch) : std::nullopt},
          {.name = "batch_size_per_gpu",  // a fraction if ranks share the batch unevenly
           .number = if_known(batch > 0, static_cast<double>(batch) / place.ranks)},
          {.name = "bucket_cap_mb", .number = if_known(run.bucket_cap_mb > 0, run.bucket_cap_mb)},
          {.name = "repeat", .integer = options_.repeat}};
}

bool MetricsFiles::is_first_start() const {
  return path().empty() || folder_.read("run.json").empty();
}

void MetricsFiles::write_run(const Place& place, const Start& start) {
  if (path().empty()) {
    return;
  }
  const auto if_positive = [](int64_t number) {
    return number > 0 ? std::optional(number) : std::nullopt;
  };
  const auto arguments = kernel_text("/proc/self/cmdline");  // each argument ends with a NUL
  Row row = constants(place);
  const Row more = {
      {.name = "device", .text = start.device},
      {.name = "host", .text = start.host},
      {.name = "cpu", .text = cpu_name(kernel_text("/proc/cpuinfo"))},
      {.name = "driver", .text = until_newline(kernel_text("/sys/module/nvidia/version"))},
      {.name = "num_steps", .integer = if_positive(start.num_steps)},
      {.name = "steps_per_epoch", .integer = if_positive(start.steps_per_epoch)},
      {.name = "sample_unit", .text = options_.run.sample_unit},
      {.name = "flops_per_sample", .number = start.flops_per_sample},
      {.name = "peak_tflops", .number = start.peak_tflops},
      {.name = "program", .text = program_name(arguments)},
      {.name = "program_version", .text = options_.run.program_version},
      {.name = "command", .text = separated_by_spaces(arguments)},
      {.name = "started", .number = started_}};
  row.insert(row.end(), more.begin(), more.end());
  for (const auto& [name, version] : named_lines(start.versions)) {
    row.push_back({.name = name, .text = version});
  }
  folder_.write("run.json", json_line(row) + "\n");
}

Row MetricsFiles::epoch_row(const Epoch& epoch, const JobNumbers& job) const {
  const auto rate_name = options_.run.sample_unit + "_per_second";
  Row row = constants(
      {.ranks = job.world_size, .gpu_type = epoch.gpu_type, .uses_gpus = epoch.uses_gpus});
  const Row numbers = {
      {.name = "steps_per_epoch",
       .integer = epoch.num_steps > 0 ? std::optional(epoch.num_steps) : std::nullopt},
      {.name = "epoch", .integer = epoch.epoch},
      {.name = "epoch_steps", .integer = epoch.num_steps_in_row},
      {.name = "train_loss", .number = job.loss()},
      {.name = "train_accuracy", .number = job.accuracy()},
      {.name = "test_loss", .number = epoch.test_loss},
      {.name = "test_accuracy", .number = epoch.test_accuracy},
      {.name = "epoch_seconds", .number = job.total.seconds},
      {.name = rate_name, .number = if_measured(job.samples_per_second())},
      {.name = "gpu_utilisation_percent", .number = if_measured(job.total.utilisation)},
      {.name = "power_w", .number = if_measured(job.total.power_w)},
      {.name = "memory_gib", .number = if_measured(job.total.memory_gib)},
      {.name = "energy_j", .number = if_measured(job.total.energy_j)},
      {.name = "mfu", .number = epoch.mfu}};
  row.insert(row.end(), numbers.begin(), numbers.end());
  add_custom(row, job.custom);
  row.push_back({.name = "time", .number = unix_time()});
  return row;
}

}  // namespace ddp::detail
