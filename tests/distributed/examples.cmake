# SPDX-License-Identifier: Apache-2.0
# The small examples as a user runs them.
function(ddp_add_example name program ranks)
  if(TARGET ${program})
    cmake_parse_arguments(arg "" "" "ARGUMENTS;OUTPUT" ${ARGN})
    set(_options)
    foreach(_text ${arg_OUTPUT})
      list(APPEND _options --expect-output ${_text})
    endforeach()
    ddp_add_launch(NAME ${name}_r${ranks} PROGRAM ${program} ARGUMENTS ${arg_ARGUMENTS} RANKS ${ranks}
                   OPTIONS ${_options})
  endif()
endfunction()
set(_small context.device=cpu data.path=${PROJECT_SOURCE_DIR}/data/cifar10-sample data.num_samples=80
    train.batch_size=8 metrics.dir= metrics.log_every=5)
foreach(_ranks 1 2)
  ddp_add_example(cluster_check cluster_check ${_ranks} ARGUMENTS device=cpu
                  OUTPUT "0:the sum is right on every rank" "0:all is well")
  ddp_add_example(quickstart quickstart ${_ranks} ARGUMENTS ${_small} train.max_steps=5
                  OUTPUT "0:step 5/5 | loss")
endforeach()
# Epochs alone decide: 80 samples in batches of 8 on one rank.
ddp_add_example(quickstart_epochs quickstart 1 ARGUMENTS ${_small} train.epochs=1 OUTPUT "0:step 10 | loss")
