# SPDX-License-Identifier: Apache-2.0
# The small examples as a user runs them.
function(ddp_add_example name program ranks)
  if(TARGET ${program})
    cmake_parse_arguments(arg "" "" "ARGUMENTS;OUTPUT;EXIT" ${ARGN})
    set(_options)
    if(arg_EXIT)
      set(_options --expect-exit "*:${arg_EXIT}")
    endif()
    foreach(_text ${arg_OUTPUT})
      list(APPEND _options --expect-output ${_text})
    endforeach()
    ddp_add_launch(NAME ${name}_r${ranks} PROGRAM ${program} ARGUMENTS ${arg_ARGUMENTS} RANKS ${ranks}
                   OPTIONS ${_options} UNHURRIED)
  endif()
endfunction()
set(_small context.device=cpu data.path=${PROJECT_SOURCE_DIR}/data/cifar10-sample data.num_samples=80
    train.batch_size=8 metrics.dir= metrics.log_every=5)
foreach(_ranks 1 2)
  ddp_add_example(quickstart quickstart ${_ranks} ARGUMENTS ${_small} train.max_steps=5
                  OUTPUT "0:step 5/5 | epoch" "0: | loss ")
endforeach()
# Epochs alone decide: 80 samples in batches of 8 on one rank.
ddp_add_example(quickstart_epochs quickstart 1 ARGUMENTS ${_small} train.epochs=1
                OUTPUT "0:step 10/10 | epoch 1.00 | loss ")
# The schedule has the length of the run, whatever tells it.
ddp_add_example(quickstart_epochs_cosine quickstart 1
                ARGUMENTS ${_small} train.epochs=1 lr_schedule.type=cosine lr_schedule.lr=0.01
                OUTPUT "0:step 10/10 | epoch 1.00 | loss " "0:lr 0.000245")
# Settings that change nothing are refused, and so is a data set that nobody named.
foreach(_setting train.grad_accum_steps=4 train.mixup=0.2 train.cutmix=1 train.label_smoothing=0.1
                 train.eval_every=1 train.cuda_graph=off train.non_finite=skip)
  ddp_add_example(quickstart_unused_${_setting} quickstart 1 ARGUMENTS ${_small} train.max_steps=2 ${_setting}
                  EXIT 64 OUTPUT "0:${_setting} has no effect")
endforeach()
foreach(_program quickstart resnet_ddp vit_ddp)
  ddp_add_example(${_program}_no_data ${_program} 1 ARGUMENTS ${_small} train.max_steps=2 data.path=
                  EXIT 64 OUTPUT "0:data.path is empty" "0:data.format=synthetic")
endforeach()
ddp_add_example(quickstart_synthetic quickstart 1
                ARGUMENTS ${_small} train.max_steps=2 data.path= data.format=synthetic data.image_size=32
                OUTPUT "0:step 2/2 | epoch" "0: | loss ")
