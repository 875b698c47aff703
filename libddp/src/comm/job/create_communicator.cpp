// SPDX-License-Identifier: Apache-2.0
#include "comm/job/create_communicator.hpp"

#include <utility>

#include "core/control/failure/failure_cause.hpp"
#include "core/control/wire/tcp_socket.hpp"
#include "core/log/error_text.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

CollectiveFailureHandler report_to(const std::shared_ptr<ControlPlane>& control_plane) {
  return [weak = std::weak_ptr(control_plane)](const CollectiveFailure& failure) {
    const auto alive = weak.lock();
    if (alive == nullptr) {
      return;
    }
    FailureCause cause;
    cause.rank = alive->rank();
    cause.host = host_name();
    cause.step = failure.step;
    cause.where = failure.collective;
    cause.message = message_of(failure.error);
    if (cause.message.starts_with(cause.where)) {  // the place stands before the message
      cause.message.replace(0, cause.where.size(), "it");
    }
    try {
      std::rethrow_exception(failure.error);
    } catch (const Error& error) {
      cause.exit_code = error.exit_code();
    } catch (const std::exception&) {
      cause.exit_code = ExitCode::PeerLost;
    }
    alive->publish_failure(cause);
  };
}

// A communicator may outlive the control plane, and then be split.
AddProbe probes_of(const std::shared_ptr<ControlPlane>& control_plane) {
  return [weak = std::weak_ptr(control_plane)](PositionBoard::Probe probe) {
    const auto alive = weak.lock();
    if (auto* board = alive == nullptr ? nullptr : alive->position_board()) {
      board->add_probe(std::move(probe));
    }
  };
}

[[noreturn]] void refuse_backend(const std::string& backend, const std::string& why) {
  throw SettingsError(concat("context.communicator.backend=", backend, ": ", why));
}

CommBackend choose_backend(const Membership& membership, at::Device device, CommBackend backend) {
  if (backend == CommBackend::Auto) {
    return membership.world_size == 1 ? CommBackend::Single
           : device.is_cuda()         ? CommBackend::Nccl
                                      : CommBackend::Mpi;
  }
  if (backend == CommBackend::Single && membership.world_size > 1) {
    refuse_backend("single", concat("it is a group of one, but the job has ", membership.world_size,
                                    " ranks; fix: use auto"));
  }
  if (backend == CommBackend::Nccl && !device.is_cuda()) {
    refuse_backend("nccl", concat("NCCL reduces CUDA tensors, but the device is ", device.str(),
                                  "; fix: use auto or mpi, or device=cuda"));
  }
  if (backend == CommBackend::Mpi && !device.is_cpu()) {
    refuse_backend("mpi", concat("the MPI communicator reduces CPU tensors, but the device is ",
                                 device.str(), "; fix: use auto or nccl, or device=cpu"));
  }
  return backend;
}

// A program can set torchrun's variables itself.
std::string origin_of_ranks(LaunchSource source) {
  return source == LaunchSource::Torchrun ? "RANK and WORLD_SIZE, as torchrun sets them"
                                          : to_string(source);
}

CommunicatorPtr create_mpi(const LaunchEnvironment& launch, const Membership& membership,
                           const CommunicatorOptions& options, std::shared_ptr<MpiRuntime> mpi,
                           CollectiveFailureHandler on_failure,
                           std::shared_ptr<CollectiveCheck> check, AddProbe add_probe) {
  if (mpi == nullptr) {
    refuse_without_mpi(launch, MpiRuntime::is_built_in());
  }
  const auto& by_mpi = mpi->membership();
  if (by_mpi.rank != membership.rank || by_mpi.world_size != membership.world_size) {
    refuse_backend(
        options.backend == CommBackend::Auto ? "auto" : "mpi",
        concat("this is rank ", membership.rank, " of ", membership.world_size, " by ",
               to_string(launch.source), ", but rank ", by_mpi.rank, " of ", by_mpi.world_size,
               " by MPI; fix: start all ranks with one mpirun or srun, and set no ranks yourself; ",
               kTrainOnSome));
  }
  MpiCommunicatorOptions mpi_options;
  mpi_options.hosts = membership.hosts;
  mpi_options.timeout = options.timeout;
  mpi_options.first_step_timeout = options.first_step_timeout;
  mpi_options.on_failure = std::move(on_failure);
  mpi_options.check = std::move(check);
  mpi_options.add_probe = std::move(add_probe);
  return make_mpi_communicator(std::move(mpi), mpi_options);
}

}  // namespace

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return detail::message_of(exception);
  } catch (...) {
    return "unknown error";
  }
}

void refuse_without_mpi(const LaunchEnvironment& launch, bool is_built_in) {
  const std::string start = concat("`mpirun -n ", launch.world_size, " …` or `srun --mpi=pmix …`");
  const std::string why =
      is_built_in
          ? concat("these ranks come from ", origin_of_ranks(launch.source),
                   "; fix: start all ranks with ", start, " and set none yourself; ", kTrainOnSome)
          : concat("this libddp was built without it; fix: ", kMpiFix, start);
  throw SettingsError(concat(launch.world_size, " ranks on CPU need MPI, and ", why,
                             " (ranks on GPUs need no MPI)"));
}

CommunicatorPtr create_communicator(const LaunchEnvironment& launch,
                                    const std::shared_ptr<ControlPlane>& control_plane,
                                    at::Device device, const CommunicatorOptions& options,
                                    std::shared_ptr<MpiRuntime> mpi) {
  const auto& membership = control_plane->membership();
  const auto backend = choose_backend(membership, device, options.backend);
  auto check =
      CollectiveCheck::create(control_plane, options.check_collectives, probes_of(control_plane));
  CommunicatorPtr communicator;
  if (backend == CommBackend::Single) {
    communicator = make_single_communicator(device, membership);
  } else if (backend == CommBackend::Mpi) {
    communicator = create_mpi(launch, membership, options, std::move(mpi), report_to(control_plane),
                              std::move(check), probes_of(control_plane));
  } else {
    communicator = make_nccl_communicator(*control_plane, device, options, report_to(control_plane),
                                          std::move(check), probes_of(control_plane));
  }
  communicator->set_control_plane(control_plane);
  control_plane->add_failure_callback(
      [weak = std::weak_ptr<Communicator>(communicator)](const FailureCause& cause) {
        if (const auto alive = weak.lock()) {
          alive->abort(cause.to_line());
        }
      });
  return communicator;
}

}  // namespace ddp::detail
