// SPDX-License-Identifier: Apache-2.0
// Everything a trainer needs. Programs may include single headers instead.
#pragma once

#include "ddp/amp/amp.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/safetensors.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/optim/ema.hpp"
#include "ddp/optim/lr_schedule.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/comm_hook.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/reduce/join.hpp"
#include "ddp/reduce/sync_batch_norm.hpp"
#include "ddp/train/checkpoint.hpp"
#include "ddp/train/config.hpp"
#include "ddp/train/graphed_step.hpp"
#include "ddp/train/metrics.hpp"
#include "ddp/train/non_finite.hpp"
#include "ddp/train/run.hpp"
#include "ddp/train/weights.hpp"
