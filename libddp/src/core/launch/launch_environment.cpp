// SPDX-License-Identifier: Apache-2.0
#include "core/launch/launch_environment.hpp"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <tuple>
#include <utility>

#include "core/launch/detect_launch.hpp"
#include "core/launch/tasks_per_node.hpp"
#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"

namespace ddp {
namespace {

constexpr int kMaxRanks = 1'000'000;

// A number and its origin ("SLURM_PROCID=5").
struct LaunchNumber {
  int value = 0;
  std::string origin;
};

class Variables {
 public:
  explicit Variables(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  // An empty variable counts as unset: shells often "remove" variables this way.
  std::optional<std::string> text(const std::string& name) const {
    auto value = lookup_(name);
    return value && value->empty() ? std::nullopt : value;
  }

  std::optional<LaunchNumber> number(const std::string& name, int min, int max = kMaxRanks) const {
    const auto value = text(name);
    if (!value) {
      return std::nullopt;
    }
    const auto parsed = detail::parse_number<int>(*value);
    if (!parsed || *parsed < min || *parsed > max) {
      throw SettingsError(concat("environment variable ", name, "='", value->substr(0, 80),
                                 "' must be a whole number from ", min, " to ", max,
                                 "; fix: unset it, or start the program through its launcher"));
    }
    return LaunchNumber{*parsed, name + "=" + *value};
  }

  LaunchNumber required(const std::string& name, int min, const LaunchNumber& because) const {
    auto value = number(name, min);
    if (!value) {
      throw SettingsError(
          concat(because.origin, " is set but ", name,
                 " is not; fix: set both, or unset the first to run a single process"));
    }
    return *value;
  }

 private:
  const EnvironmentLookup& lookup_;
};

[[noreturn]] void contradiction(const std::string& left, const std::string& right,
                                const std::string& rule) {
  throw SettingsError(concat(left, " contradicts ", right, ": ", rule));
}

void require_below(const std::optional<LaunchNumber>& index,
                   const std::optional<LaunchNumber>& count, const char* rule) {
  if (index && count && index->value >= count->value) {
    contradiction(index->origin, count->origin, rule);
  }
}

void require_same(const std::optional<LaunchNumber>& left, const std::optional<LaunchNumber>& right,
                  const std::string& rule) {
  if (left && right && left->value != right->value) {
    contradiction(left->origin, right->origin, rule);
  }
}

// Without one half of a pair the other half would be a guess.
void require_both(const std::optional<LaunchNumber>& left, const char* left_name,
                  const std::optional<LaunchNumber>& right, const char* right_name) {
  if (left.has_value() == right.has_value()) {
    return;
  }
  throw SettingsError(
      concat((left ? left : right)->origin, " is set but ", left ? right_name : left_name,
             " is not; fix: set both, or start the ranks through their launcher, which "
             "sets both"));
}

// The launcher's values for this process, before they are checked.
struct Placement {
  std::optional<LaunchNumber> rank, world_size, local_rank, local_world_size, node_rank, num_nodes;
};

void check(const Placement& p) {
  require_below(p.rank, p.world_size, "a rank must be smaller than the number of ranks");
  require_below(p.node_rank, p.num_nodes, "a node's index must be smaller than their number");
  require_below(p.local_rank, p.local_world_size,
                "a local rank must be smaller than the number of ranks on the node");
  if (p.local_world_size && p.world_size && p.local_world_size->value > p.world_size->value) {
    contradiction(p.local_world_size->origin, p.world_size->origin,
                  "a node cannot hold more ranks than the job has");
  }
  if (p.num_nodes && p.world_size && p.num_nodes->value > p.world_size->value) {
    contradiction(p.num_nodes->origin, p.world_size->origin, "every node must hold a rank");
  }
  if (p.local_rank && p.rank && p.local_rank->value > p.rank->value) {
    contradiction(p.local_rank->origin, p.rank->origin, "a local rank cannot exceed the rank");
  }
}

void apply(const Placement& p, LaunchEnvironment& result) {
  const auto set = [](const std::optional<LaunchNumber>& from, int& to) {
    to = from ? from->value : to;
  };
  set(p.rank, result.rank);
  set(p.world_size, result.world_size);
  set(p.local_rank, result.local_rank);
  set(p.local_world_size, result.local_world_size);
  set(p.node_rank, result.node_rank);
  set(p.num_nodes, result.num_nodes);
}

// Default without node information: ranks fill the nodes in order.
void fill_nodes(Placement& p) {
  if (p.rank && p.world_size && p.local_world_size) {
    const int local = p.local_world_size->value;
    const std::string origin = p.rank->origin + ", " + p.local_world_size->origin;
    if (!p.num_nodes) {
      p.num_nodes = LaunchNumber{(p.world_size->value + local - 1) / local, origin};
    }
    if (!p.node_rank) {
      p.node_rank = LaunchNumber{std::min(p.rank->value / local, p.num_nodes->value - 1), origin};
    }
  }
}

// Kubeflow describes a pod to torchrun: RANK and PET_NODE_RANK count pods there. A program that the
// pod starts without torchrun is the pod's only rank.
void require_one_process_per_pod(const Variables& env) {
  const auto count = env.text("PET_NPROC_PER_NODE");
  if (!count || env.text("LOCAL_RANK")) {
    return;
  }
  if (const auto parsed = detail::parse_number<int>(*count); parsed && *parsed > 1) {
    throw SettingsError(concat("PET_NPROC_PER_NODE=", *count,
                               " asks for that many ranks per pod, but LOCAL_RANK is not set: the "
                               "pod started this program only once; fix: start it with torchrun "
                               "--no-python, or give each pod one GPU and one process"));
  }
}

Placement read_pod(const Variables& env, LaunchEnvironment& result) {
  require_one_process_per_pod(env);
  Placement p;
  p.rank = env.number("PET_NODE_RANK", 0);
  p.world_size = env.required("PET_NNODES", 1, *p.rank);
  p.node_rank = p.rank;
  p.num_nodes = p.world_size;
  result.source = LaunchSource::Torchrun;
  const auto addr = env.text("PET_MASTER_ADDR");
  result.master_addr = addr ? *addr : env.text("MASTER_ADDR").value_or("");
  const auto port = env.number("PET_MASTER_PORT", 0, 65535);
  if (const auto given = port ? port : env.number("MASTER_PORT", 0, 65535)) {
    result.master_port = given->value;
  }
  return p;
}

Placement read_torchrun(const Variables& env, LaunchEnvironment& result) {
  require_one_process_per_pod(env);
  Placement p;
  p.rank = env.number("RANK", 0);
  p.world_size = env.required("WORLD_SIZE", 1, *p.rank);
  p.local_rank = env.number("LOCAL_RANK", 0);
  p.local_world_size = env.number("LOCAL_WORLD_SIZE", 1);
  p.node_rank = env.number("GROUP_RANK", 0);
  p.num_nodes = env.number("GROUP_WORLD_SIZE", 1);
  require_both(p.node_rank, "GROUP_RANK", p.num_nodes, "GROUP_WORLD_SIZE");
  result.source = LaunchSource::Torchrun;
  result.master_addr = env.text("MASTER_ADDR").value_or("");
  if (const auto port = env.number("MASTER_PORT", 0, 65535)) {
    result.master_port = port->value;
  }
  const auto run_id = env.text("TORCHELASTIC_RUN_ID");
  result.torchrun_store = run_id && env.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (result.job_id.empty() && run_id && *run_id != "none") {
    result.job_id = *run_id;
  }
  if (const auto count = env.number("TORCHELASTIC_RESTART_COUNT", 0)) {
    result.restart_count = count->value;
  }
  return p;
}

Placement read_open_mpi(const Variables& env, LaunchEnvironment& result) {
  Placement p;
  p.rank = env.number("OMPI_COMM_WORLD_RANK", 0);
  p.world_size = env.required("OMPI_COMM_WORLD_SIZE", 1, *p.rank);
  p.local_rank = env.number("OMPI_COMM_WORLD_LOCAL_RANK", 0);
  p.local_world_size = env.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1);
  require_both(p.local_rank, "OMPI_COMM_WORLD_LOCAL_RANK", p.local_world_size,
               "OMPI_COMM_WORLD_LOCAL_SIZE");
  fill_nodes(p);
  result.source = LaunchSource::OpenMpi;
  result.use_mpi = true;
  return p;
}

// The batch script also has SLURM_PROCID=0 and SLURM_NTASKS=8 but is not a task. Only a step has a
// step id. Ids of batch, extern and interactive steps are names or above 2^32 - 16.
bool is_slurm_step(const Variables& env) {
  const auto step = env.text("SLURM_STEP_ID");
  const auto id = step ? detail::parse_number<uint32_t>(*step) : std::nullopt;
  return env.text("SLURM_PROCID") && id && *id < 0xffff'fff0u;
}

void read_slurm_layout(const Variables& env, Placement& p) {
  constexpr auto kTasks = "SLURM_STEP_TASKS_PER_NODE";
  if (const auto text = env.text(kTasks)) {
    const auto tasks =
        detail::parse_tasks_per_node(*text, p.node_rank ? p.node_rank->value : 0, kTasks);
    const std::string origin = concat(kTasks, "=", *text);
    if (tasks.num_tasks != p.world_size->value) {
      contradiction(origin, p.world_size->origin, "the tasks of all nodes must add up");
    }
    if (p.num_nodes && tasks.num_nodes != p.num_nodes->value) {
      contradiction(origin, p.num_nodes->origin, "there must be one count per node");
    }
    p.local_world_size = LaunchNumber{static_cast<int>(tasks.on_node), origin};
  } else {
    p.local_world_size = env.number("SLURM_NTASKS_PER_NODE", 1);
  }
}

Placement read_slurm(const Variables& env, LaunchEnvironment& result) {
  Placement p;
  p.rank = env.number("SLURM_PROCID", 0);
  p.world_size = env.number("SLURM_STEP_NUM_TASKS", 1);
  if (!p.world_size) {
    p.world_size = env.required("SLURM_NTASKS", 1, *p.rank);
  }
  require_same(p.world_size, env.number("SLURM_NTASKS", 1),
               "both count the tasks of one step; fix: unset the one that was exported by hand");
  p.local_rank = env.number("SLURM_LOCALID", 0);
  p.node_rank = env.number("SLURM_NODEID", 0);
  p.num_nodes = env.number("SLURM_STEP_NUM_NODES", 1);
  if (!p.num_nodes) {
    p.num_nodes = env.number("SLURM_NNODES", 1);
  }
  require_both(p.node_rank, "SLURM_NODEID", p.num_nodes, "SLURM_NNODES");
  read_slurm_layout(env, p);
  require_both(p.local_rank, "SLURM_LOCALID", p.local_world_size, "SLURM_STEP_TASKS_PER_NODE");
  const auto pmix_rank = env.number("PMIX_RANK", 0);
  require_same(p.rank, pmix_rank, "Slurm and its PMIx plugin must agree on the rank");
  result.source = LaunchSource::Slurm;
  result.use_mpi = pmix_rank.has_value();
  result.step_id = env.text("SLURM_STEP_ID").value_or("");
  return p;
}

Placement read_pmix(const Variables& env, LaunchEnvironment& result) {
  Placement p;
  p.rank = env.number("PMIX_RANK", 0);
  result.source = LaunchSource::Pmix;
  result.use_mpi = true;
  result.world_size = 0;
  return p;
}

// Tries the sources in order; the first one present is the launcher.
Placement read_launcher(const Variables& env, LaunchEnvironment& result) {
  result.job_id = env.text("SLURM_JOB_ID").value_or("");
  if (const auto count = env.number("SLURM_RESTART_COUNT", 0)) {
    result.restart_count = count->value;
  }
  if (env.text("RANK")) {
    return read_torchrun(env, result);
  }
  if (env.text("OMPI_COMM_WORLD_RANK")) {
    return read_open_mpi(env, result);
  }
  if (is_slurm_step(env)) {
    return read_slurm(env, result);
  }
  if (env.text("PMIX_RANK")) {
    return read_pmix(env, result);
  }
  if (env.text("PET_NODE_RANK")) {
    return read_pod(env, result);
  }
  return {};
}

std::optional<LaunchNumber> argument(const char* name, std::optional<int> value, int min) {
  if (!value) {
    return std::nullopt;
  }
  if (*value < min || *value > kMaxRanks) {
    throw SettingsError(
        concat("argument ", name, "=", *value, " must be from ", min, " to ", kMaxRanks));
  }
  return LaunchNumber{*value, concat("argument ", name, "=", *value)};
}

void merge(const std::optional<LaunchNumber>& argument_value,
           std::optional<LaunchNumber>& launcher_value) {
  require_same(argument_value, launcher_value,
               concat("fix: omit the argument, or unset the variable if no launcher set it; ",
                      detail::kTrainOnSome));
  if (argument_value) {
    launcher_value = argument_value;
  }
}

std::pair<std::string, int> parse_rendezvous(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  int port = 0;
  if (colon != std::string::npos) {
    port = detail::parse_number<int>(std::string_view(text).substr(colon + 1)).value_or(0);
  }
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);  // [::1]:29500
  }
  if (port < 1 || port > 65535 || host.empty()) {
    throw SettingsError(concat("argument rendezvous='", text.substr(0, 80),
                               "' must be host:port with a port from 1 to 65535"));
  }
  return {host, port};
}

void merge_arguments(const LaunchArguments& arguments, Placement& p, LaunchEnvironment& result) {
  const auto rank = argument("rank", arguments.rank, 0);
  const auto world_size = argument("world_size", arguments.world_size, 1);
  merge(rank, p.rank);
  merge(world_size, p.world_size);
  merge(argument("local_rank", arguments.local_rank, 0), p.local_rank);
  merge(argument("local_world_size", arguments.local_world_size, 1), p.local_world_size);
  if (rank && !p.world_size && result.source == LaunchSource::Single) {
    throw SettingsError(concat(rank->origin, " is given but world_size is not; fix: give both"));
  }
  if (world_size && world_size->value > 1 && !p.rank) {
    throw SettingsError(
        concat(world_size->origin,
               " is given but rank is not, and no launcher sets it; fix: give both, or "
               "start the program with srun, mpirun or torchrun"));
  }
  if (rank && world_size && result.source == LaunchSource::Single) {
    result.source = LaunchSource::Arguments;
    if (!p.local_rank && p.local_world_size) {
      p.local_rank = LaunchNumber{rank->value % p.local_world_size->value, rank->origin};
    }
    fill_nodes(p);
  }
  if (arguments.rendezvous) {
    std::tie(result.master_addr, result.master_port) = parse_rendezvous(*arguments.rendezvous);
    result.torchrun_store = false;
  }
}

// If the launcher sets the number of ranks but not this rank, each process would silently run
// alone. An argument world_size=1 states that this is intended.
void refuse_lone_world_size(const Variables& env, const LaunchArguments& arguments,
                            const LaunchEnvironment& result) {
  if (result.source != LaunchSource::Single || arguments.world_size) {
    return;
  }
  for (const auto& [size, rank] :
       {std::pair("WORLD_SIZE", "RANK"), std::pair("PET_NNODES", "PET_NODE_RANK")}) {
    if (const auto count = env.number(size, 1); count && count->value > 1) {
      throw SettingsError(concat(count->origin, " is set but ", rank,
                                 " is not, and no launcher sets this process's rank; fix: start "
                                 "the ranks with torchrun, mpirun or srun, or unset ",
                                 size, " to run a single process"));
    }
  }
  // No variable of Open MPI or PMIx is set, so mpirun of MPICH or Intel MPI started this process.
  if (const auto count = env.number("PMI_SIZE", 1); count && count->value > 1) {
    throw SettingsError(
        concat(count->origin, " is set, but no variable that libddp reads: mpirun of ",
               "MPICH or Intel MPI starts processes that would each train alone; fix: "
               "start the ranks with mpirun of Open MPI, srun or torchrun, or unset "
               "PMI_SIZE to run a single process"));
  }
}

}  // namespace

const char* to_string(LaunchSource source) {
  switch (source) {
    case LaunchSource::Arguments:
      return "explicit arguments";
    case LaunchSource::Torchrun:
      return "torchrun";
    case LaunchSource::OpenMpi:
      return "mpirun";
    case LaunchSource::Slurm:
      return "a Slurm step";
    case LaunchSource::Pmix:
      return "PMIx";
    case LaunchSource::Single:
      return "a single process";
  }
  return "?";
}

EnvironmentLookup process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
}

LaunchEnvironment detect_launch_environment(const LaunchArguments& arguments,
                                            const EnvironmentLookup& environment) {
  const Variables env(environment);
  LaunchEnvironment result;
  Placement placement = read_launcher(env, result);
  merge_arguments(arguments, placement, result);
  refuse_lone_world_size(env, arguments, result);
  check(placement);
  apply(placement, result);
  if (result.source == LaunchSource::Torchrun && result.world_size > 1 &&
      (result.master_addr.empty() || result.master_port == 0)) {
    throw SettingsError(
        concat(placement.world_size->origin,
               " is set but MASTER_ADDR or MASTER_PORT is not; fix: set both to the host "
               "and a free port of rank 0, or use torchrun, which sets them"));
  }
  return result;
}

}  // namespace ddp
