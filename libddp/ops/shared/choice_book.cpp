// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/choice_book.hpp"

#ifdef DDP_HAS_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <vector>

#include "ops/shared/private_stream.hpp"
#endif

namespace ddp::ops::detail {

// Never destroyed: a plan may be written late in the process.
ChoiceBook& ChoiceBook::instance() {
  static auto* book = new ChoiceBook;
  return *book;
}

std::optional<size_t> ChoiceBook::find(const std::string& what, size_t count) const {
  const std::lock_guard lock(mutex_);
  const auto found = choices_.find(what);
  if (found == choices_.end() || static_cast<size_t>(found->second.count) != count) {
    return std::nullopt;
  }
  return static_cast<size_t>(found->second.chosen);
}

void ChoiceBook::note(const std::string& what, size_t count, size_t chosen) {
  const std::lock_guard lock(mutex_);
  keep(what, {static_cast<int64_t>(count), static_cast<int64_t>(chosen)});
}

void ChoiceBook::keep(const std::string& what, const MeasuredChoice& choice) {
  if (choices_.size() < kMaxNoted || choices_.contains(what)) {
    choices_[what] = choice;
  }
}

MeasuredChoices ChoiceBook::all() const {
  const std::lock_guard lock(mutex_);
  return choices_;
}

void ChoiceBook::adopt(const MeasuredChoices& choices) {
  const std::lock_guard lock(mutex_);
  for (const auto& [what, choice] : choices) {
    keep(what, choice);
  }
}

#ifdef DDP_HAS_CUDA
namespace {

constexpr int kTimedCalls = 20;

bool runs(const std::function<void(size_t)>& call, size_t index) {
  try {
    call(index);
    return true;
  } catch (const c10::Error&) {
    cudaGetLastError();  // clears the candidate's handled error
    return false;
  }
}

/// Milliseconds of a replay of kTimedCalls captured calls; negative if the candidate does not run.
float time_captured(const std::function<void(size_t)>& call, size_t index, cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  bool ran = true;
  if (!runs(call, index)) {  // a library may load code here, which a capture forbids
    return -1;
  }
  C10_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    for (int i = 0; i < kTimedCalls; ++i) {
      call(index);
    }
  } catch (const c10::Error&) {
    ran = false;
  }
  const auto ended = cudaStreamEndCapture(stream, &graph);
  cudaGraphExec_t executable = nullptr;
  if (!ran || ended != cudaSuccess || graph == nullptr ||
      cudaGraphInstantiate(&executable, graph, 0) != cudaSuccess) {
    cudaGetLastError();  // clears the candidate's handled error
    if (graph != nullptr) {
      cudaGraphDestroy(graph);
    }
    return -1;
  }
  cudaEvent_t events[2];
  for (auto& event : events) {
    C10_CUDA_CHECK(cudaEventCreate(&event));
  }
  float best = -1;
  for (int round = 0; round < 4; ++round) {  // the first round warms up
    C10_CUDA_CHECK(cudaEventRecord(events[0], stream));
    C10_CUDA_CHECK(cudaGraphLaunch(executable, stream));
    C10_CUDA_CHECK(cudaEventRecord(events[1], stream));
    C10_CUDA_CHECK(cudaEventSynchronize(events[1]));
    float elapsed = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&elapsed, events[0], events[1]));
    if (round > 0 && (best < 0 || elapsed < best)) {
      best = elapsed;
    }
  }
  for (const auto event : events) {
    cudaEventDestroy(event);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  return best;
}

/// One per device.
struct MeasuringStream {
  explicit MeasuringStream(const c10::Stream& main) : stream(make_private_stream(main.device())) {}
  c10::cuda::CUDAStream stream;
};

}  // namespace

size_t choose_fastest(const std::string& what, c10::Device device, size_t count,
                      const std::function<void(size_t)>& call, float same_time) {
  // All callers measure on one stream, and concurrent measurements would disturb each other.
  // Callers only lock their own plans.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto& book = ChoiceBook::instance();
  c10::cuda::getCurrentCUDAStream().synchronize();
  const auto stream =
      per_stream<MeasuringStream>(c10::cuda::getDefaultCUDAStream(device.index())).stream;
  const c10::cuda::CUDAStreamGuard guard(stream);
  const auto known = what.empty() ? std::nullopt : book.find(what, count);
  if (known && runs(call, *known)) {
    stream.synchronize();
    return *known;
  }
  std::vector<float> times;
  float fastest = -1;
  for (size_t i = 0; i < count; ++i) {
    times.push_back(time_captured(call, i, stream));
    if (times.back() >= 0 && (fastest < 0 || times.back() < fastest)) {
      fastest = times.back();
    }
  }
  stream.synchronize();
  for (size_t i = 0; i < count; ++i) {
    if (times[i] >= 0 && times[i] <= fastest * same_time) {
      if (!what.empty()) {
        book.note(what, count, i);
      }
      return i;
    }
  }
  return count;
}
#endif

}  // namespace ddp::ops::detail
