// SPDX-License-Identifier: Apache-2.0
// A small training run, one of whose ranks gets a signal at a named place:
//
//   kill_program fault.folder=DIR fault.phase=forward fault.signal=STOP fault.victim=1
//   checkpoint.dir=…
//
// Each rank writes its process id into DIR/rank_<r>.pid. Just before the signal is sent, DIR/deed
// receives the time on the steady clock, which all processes of a host share. The model has
// dropout, BatchNorm and Adam's state, so a resume that loses any state ends with other bits. The
// last line of a complete run is "the state's hash is …".
#include <ATen/record_function.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>

#include "core/launch/detect_launch.hpp"
#include "ddp/ddp.hpp"
#include "train/checkpoint/checkpoint_impl.hpp"

namespace {

using namespace std::chrono_literals;

struct FaultOptions {
  std::string phase = "none";
  std::string signal = "KILL";
  std::string folder;
  int64_t victim = 0;
  int64_t step = 8;      // of the phases inside a step
  int64_t save = 10;     // the save of the other phases, by its number of steps
  int64_t step_ms = 10;  // pause in each step
  int64_t load_ms = 0;   // longest pause in each load of a batch
};
void describe_fields(FaultOptions& options, ddp::FieldVisitor& visitor) {
  visitor.field(
      {.name = "phase",
       .doc = "where the signal is sent",
       .choices = {"none", "rendezvous", "meeting", "check", "broadcast", "forward", "first_bucket",
                   "last_bucket", "optimizer", "save", "written", "rename", "commit"}},
      options.phase);
  visitor.field({.name = "signal", .doc = "which signal", .choices = {"KILL", "TERM", "STOP"}},
                options.signal);
  visitor.field({.name = "folder", .doc = "of process ids and the deed"}, options.folder);
  visitor.field({.name = "victim", .doc = "which rank gets the signal"}, options.victim);
  visitor.field({.name = "step", .doc = "of phases inside a step"}, options.step);
  visitor.field({.name = "save", .doc = "steps of the save of the other phases"}, options.save);
  visitor.field({.name = "step_ms", .doc = "pause in each step"}, options.step_ms);
  visitor.field({.name = "load_ms", .doc = "longest pause in each load of a batch"},
                options.load_ms);
}

/// Sends the signal when the victim comes to the phase.
class Fault {
 public:
  explicit Fault(FaultOptions options, int rank) : options_(std::move(options)), rank_(rank) {
    std::ofstream(pid_file(rank)) << getpid() << '\n';
  }

  const FaultOptions& options() const { return options_; }
  bool is_planned(const char* phase) const { return options_.phase == phase; }

  /// The calling rank is at `phase`.
  void pass(const char* phase) {
    if (is_planned(phase) && rank_ == options_.victim) {
      strike();
    }
  }
  void pass(const char* phase, int64_t step) {
    if (step == options_.step) {
      pass(phase);
    }
  }
  /// As pass(), before the first step. A rank that was asked to stop there goes on loading.
  void pass_while_loading(const char* phase) {
    pass(phase);
    if (is_planned(phase) && rank_ == options_.victim && options_.signal == "TERM") {
      std::this_thread::sleep_for(20s);
    }
  }
  /// Only rank 0 comes to `phase`, whoever the victim is.
  void pass_for_all(const char* phase) {
    if (is_planned(phase)) {
      strike();
    }
  }

 private:
  std::string pid_file(int64_t rank) const {
    return ddp::concat(options_.folder, "/rank_", rank, ".pid");
  }

  void strike() {
    int victim = 0;
    std::ifstream(pid_file(options_.victim)) >> victim;
    const std::string deed = options_.folder + "/deed";
    std::ofstream(deed + ".new") << std::chrono::steady_clock::now().time_since_epoch().count();
    std::rename((deed + ".new").c_str(), deed.c_str());
    const std::map<std::string, int> numbers{
        {"KILL", SIGKILL}, {"TERM", SIGTERM}, {"STOP", SIGSTOP}};
    kill(victim, numbers.at(options_.signal));
    if (victim == getpid() && options_.signal != "TERM") {
      std::this_thread::sleep_for(10ms);  // the signal may arrive at another thread first
    }
  }

  const FaultOptions options_;
  const int rank_;
};

/// The system's calls, with the phases of a save.
class FaultFileOps : public ddp::FileOps {
 public:
  FaultFileOps(Fault& fault, int rank)
      : fault_(fault),
        save_(ddp::concat(".saving_", std::string(10 - digits().size(), '0'), digits())),
        own_file_(ddp::concat("/rank_0000", rank, ".safetensors")) {}

  int open(const char* path, int flags, mode_t mode) override {
    const int fd = FileOps::open(path, flags, mode);
    const std::string name = path;
    if (is_of_save(name) && name.ends_with(own_file_)) {
      own_fd_ = fd;
    }
    return fd;
  }
  int close(int fd) override {
    const int result = FileOps::close(fd);
    if (fd == own_fd_) {
      own_fd_ = -1;
      fault_.pass("written");
    }
    return result;
  }
  int rename(const char* from, const char* to) override {
    const bool commits = is_of_save(from);
    if (commits) {
      fault_.pass_for_all("rename");
    }
    const int result = FileOps::rename(from, to);
    if (commits) {
      fault_.pass_for_all("commit");
    }
    return result;
  }

 private:
  std::string digits() const { return std::to_string(fault_.options().save); }
  bool is_of_save(const std::string& path) const { return path.find(save_) != std::string::npos; }

  Fault& fault_;
  const std::string save_, own_file_;
  int own_fd_ = -1;  // of the writing thread
};

// LibTorch calls a plain function around each operation of this thread.
Fault* observed_fault = nullptr;

/// The signal follows the update's first operation.
class UpdateObserver {
 public:
  UpdateObserver(Fault& fault, int64_t step) {
    if (!fault.is_planned("optimizer") || step != fault.options().step) {
      return;
    }
    observed_fault = &fault;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(nullptr, [](const at::RecordFunction& call,
                                               at::ObserverContext*) {
          const std::string name = call.name();
          if (observed_fault != nullptr && name.find("adamw") != std::string::npos) {
            std::exchange(observed_fault, nullptr)->pass("optimizer");
          }
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~UpdateObserver() {
    if (handle_ != 0) {
      at::removeCallback(handle_);
    }
  }

 private:
  at::CallbackHandle handle_ = 0;
};

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 6; ++i) {
      layers->push_back(torch::nn::Linear(kWidth, kWidth));
      layers->push_back(torch::nn::BatchNorm1d(kWidth));
      layers->push_back(torch::nn::Functional(torch::relu));
    }
    layers->push_back(torch::nn::Dropout(0.1));
    layers->push_back(torch::nn::Linear(kWidth, kClasses));
    register_module("layers", layers);
  }
  torch::Tensor forward(const torch::Tensor& input) {
    before_forward();
    return layers->forward(input);
  }

  static constexpr int64_t kWidth = 128, kClasses = 10;
  torch::nn::Sequential layers;
  std::function<void()> before_forward = [] {};
};
TORCH_MODULE(Net);

/// The default reduction, with the phases of a backward.
class FaultHook : public ddp::CommHook {
 public:
  explicit FaultHook(Fault& fault) : fault_(fault) {}
  std::string name() const override { return "fault"; }
  void set_step(int64_t step) { step_ = step; }
  void start(ddp::GradBucket& bucket) override {
    // A backward with one bucket would have no place between the first and the last.
    if (step_ == fault_.options().step && bucket.is_last && bucket.index < 2) {
      throw std::runtime_error("the backward has fewer than three buckets");
    }
    if (bucket.is_last) {
      fault_.pass("last_bucket", step_);
    }
    bucket.buffer.div_(bucket.divisor);
    works_[bucket.index] = bucket.communicator->all_reduce(bucket.buffer);
    if (bucket.index == 0) {
      fault_.pass("first_bucket", step_);
    }
  }
  void finish(ddp::GradBucket& bucket) override { works_.at(bucket.index)->wait(); }
  void reset() override { works_.clear(); }

 private:
  Fault& fault_;
  int64_t step_ = 0;
  std::map<int, ddp::WorkPtr> works_;
};

/// Some batches take long to load.
class SlowDataset {
 public:
  SlowDataset(ddp::TensorDataset data, int64_t most_ms)
      : data_(std::move(data)), most_ms_(most_ms) {}
  int64_t size() const { return data_.size(); }
  ddp::Example get(int64_t index) const { return data_.get(index); }
  ddp::Batch get_batch(const std::vector<int64_t>& indices) const {
    if (most_ms_ > 0) {
      // No generator: a few of the samples stand for chance.
      std::this_thread::sleep_for(std::chrono::milliseconds(indices.front() % 8 * most_ms_ / 7));
    }
    return data_.get_batch(indices);
  }

 private:
  const ddp::TensorDataset data_;
  const int64_t most_ms_;
};

std::shared_ptr<SlowDataset> make_data(int64_t load_ms) {
  const at::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto inputs = torch::randn({200, NetImpl::kWidth}, generator);
  const auto targets = torch::randint(NetImpl::kClasses, {200}, generator);
  return std::make_shared<SlowDataset>(ddp::TensorDataset(inputs, targets), load_ms);
}

// Over parameters, buffers, the optimizer's state and the position in the data.
std::string hash_of_state(const std::vector<const ddp::Stateful*>& objects) {
  ddp::NamedParameters tensors;
  for (const auto* object : objects) {
    const auto state = object->state_dict();
    for (const auto& [key, tensor] : state.tensors) {
      tensors.push_back({object->state_name() + "." + key.text(), tensor});
    }
    for (const auto& [key, parts] : state.parts) {  // of this rank
      tensors.push_back({object->state_name() + "." + key.text(), parts.front().tensor});
    }
  }
  return ddp::fingerprint_of(tensors);
}

/// One start of the run.
class Run {
 public:
  Run(ddp::Context& context, const ddp::Config& config, Fault& fault)
      : context_(context),
        config_(config),
        fault_(fault),
        ops_(fault, context.rank()),
        sampler_(200, context.communicator(), config.sampler),
        loader_(make_data(fault.options().load_ms), sampler_, context.device(), config.loader),
        hook_(std::make_shared<FaultHook>(fault)) {}

  void train() {
    wrap();
    auto optimizer = ddp::make_optimizer(*model_, config_.optimizer);
    ddp::Metrics metrics(context_, config_.metrics);
    ddp::detail::CheckpointerImpl checkpointer(context_.control_plane(), context_.device(),
                                               config_.checkpoint, {*model_, optimizer, loader_},
                                               ops_, &context_);
    checkpointer.set_before_save([&] {
      if (saving_ == fault_.options().save) {
        fault_.pass("save");
      }
      return std::string();
    });
    const auto first = checkpointer.restore();
    say(ddp::concat("training begins at step ", first));
    const auto num_steps = config_.train.max_steps;
    metrics.begin(first, num_steps, loader_.num_batches());
    for (auto step = first; step < num_steps; ++step) {
      const auto loss = train_step(*optimizer, step);
      metrics.end_step(step, {.loss = loss, .num_samples = config_.train.batch_size});
      saving_ = step + 1;
      checkpointer.save_if_due(step);
      if (step + 2 == fault_.options().step) {
        checkpointer.wait();  // the last save before the fault is certain
      }
    }
    checkpointer.save(num_steps - 1, std::nullopt);
    checkpointer.wait();
    auto& plane = context_.control_plane();
    std::string hash = plane.require_equal("the hash of the model", hash_of_state({&*model_}));
    for (const auto& of_rank : plane.all_gather(hash_of_state({optimizer.get()}))) {
      hash += "_" + of_rank;  // with zero1 each rank has other parts
    }
    say(ddp::concat("the state's hash is ", hash));
  }

 private:
  void wrap() {
    context_.communicator()->barrier();
    fault_.pass_while_loading("check");
    auto options = config_.ddp;
    options.init_sync = false;  // so that the broadcast can be interrupted apart from the check
    torch::manual_seed(context_.rank());
    Net net;
    net->before_forward = [this] { fault_.pass("forward", step_); };
    model_.emplace(net, context_.communicator(), options);
    if (!config_.optimizer.zero1) {  // which takes no hook: without the places in a bucket
      model_->register_comm_hook(hook_);
    }
    fault_.pass_while_loading("broadcast");
    model_->sync_module_states();
  }

  torch::Tensor train_step(ddp::Optimizer& optimizer, int64_t step) {
    step_ = step;
    hook_->set_step(step);
    std::this_thread::sleep_for(std::chrono::milliseconds(fault_.options().step_ms));
    auto batch = loader_.next();
    model_->zero_grad();
    show_place(step, "forward");
    auto loss = torch::cross_entropy_loss(model_->forward(batch.data), batch.target);
    show_place(step, "backward");
    loss.backward();
    show_place(step, "optimizer");
    const UpdateObserver observer(fault_, step);
    optimizer.step(0.01);
    return loss.detach();
  }

  // Places travel at most every few milliseconds. The one of the fault must be known to all.
  void show_place(int64_t step, const char* where) {
    context_.set_progress(step, where);
    if (step == fault_.options().step && !fault_.is_planned("none")) {
      std::this_thread::sleep_for(100ms);
    }
  }

  void say(const std::string& text) const {
    if (context_.is_main()) {
      std::printf("%s\n", text.c_str());
      std::fflush(stdout);
    }
  }

  ddp::Context& context_;
  const ddp::Config& config_;
  Fault& fault_;
  FaultFileOps ops_;
  ddp::DistributedSampler sampler_;
  ddp::DataLoader<SlowDataset> loader_;
  std::shared_ptr<FaultHook> hook_;
  std::optional<ddp::DistributedDataParallel<Net>> model_;
  int64_t step_ = 0, saving_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  // A signal that arrives before ddp::run must be a request too.
  const ddp::StopSignalHandlers handlers;
  const auto rank = ddp::detect_launch_environment({}, ddp::process_environment()).rank;
  const std::vector<ddp::Section> sections{ddp::declare_section<FaultOptions>("fault")};
  std::optional<Fault> fault;
  try {
    const auto config = ddp::Config::from_command_line(argc, argv, sections);
    fault.emplace(config.section<FaultOptions>("fault"), rank);
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.exit_code());
  }
  fault->pass("rendezvous");
  return ddp::run(
      argc, argv,
      [&](ddp::Context& context, const ddp::Config& config) {
        static_cast<void>(config.section<FaultOptions>("fault"));
        fault->pass_while_loading("meeting");
        Run(context, config, *fault).train();
      },
      sections);
}
