# SPDX-License-Identifier: Apache-2.0
# The programs of docs/recipes as a user runs them.
function(ddp_add_recipe name recipe ranks)
  ddp_add_example(recipe_${name} recipe_${recipe} ${ranks} ${ARGN})
endfunction()
set(_run context.device=cpu metrics.dir=)
set(_images ${_run} data.path=${PROJECT_SOURCE_DIR}/data/cifar10-sample data.num_samples=163)
foreach(_ranks 1 2)
  # The results are those of the initial weights, which are equal on any number of ranks. 163 is odd, so a padded
  # evaluation would show.
  ddp_add_recipe(evaluation evaluation ${_ranks} ARGUMENTS ${_images} train.epochs=2 lr_schedule.lr=0
                 loader.global_batch_size=16
                 OUTPUT "0:step 11/22 | top1 0.08589 | top5 0.4601 | images 163" "0:step 22/22 | top1 0.08589")
  # loader.drop_last is for training: the evaluation keeps its last batch, which is short.
  ddp_add_recipe(evaluation_drop_last evaluation ${_ranks}
                 ARGUMENTS ${_images} train.epochs=1 lr_schedule.lr=0 loader.global_batch_size=16 loader.drop_last=true
                 OUTPUT "0:step 10/10 | top1 0.08589 | top5 0.4601 | images 163")
  ddp_add_recipe(own_data own_data ${_ranks} ARGUMENTS ${_run} train.epochs=5 loader.global_batch_size=32
                 OUTPUT "0:step 80/80 | loss 0.0" "0:| accuracy 100.00 % | " "0: tokens/s | longest 12")
  # The noise is that of the samples, so the loss is too.
  ddp_add_recipe(sample_noise sample_noise ${_ranks} ARGUMENTS ${_run} train.epochs=4 loader.global_batch_size=64
                 metrics.log_every=8 OUTPUT "0:step 8/32 | epoch 1.00 | loss 0.758" "0:step 32/32 | epoch 4.00 | loss 0.492")
  ddp_add_recipe(early_stopping early_stopping ${_ranks}
                 ARGUMENTS ${_run} train.epochs=100 loader.global_batch_size=8 metrics.log_every=100
                 OUTPUT "0:early stopping: no improvement in 3 evaluations" "0: the best was 0.568")
  ddp_add_recipe(inputs_and_outputs inputs_and_outputs ${_ranks}
                 ARGUMENTS ${_run} train.max_steps=300 metrics.log_every=100 ddp.find_unused_parameters=true
                 OUTPUT "0:step 300/300 | loss 0." "0: | error 0.2" "0: | divergence ")
  ddp_add_recipe(gan gan ${_ranks} ARGUMENTS ${_run} train.max_steps=1000 metrics.log_every=1000
                 OUTPUT "0:step 1000/1000 | d_loss 1." "0: | g_loss 0." "0: | distance 0.")
  set(_first_cause "at step 20 in training: sample 17 is broken")
  if(_ranks EQUAL 1)
    set(_first_cause "first cause: sample 17 is broken (rank 0 at step 20 in training)")
  endif()
  ddp_add_recipe(hooks_failure hooks ${_ranks} ARGUMENTS context.device=cpu loop.fail_at=20 EXIT 1
                 OUTPUT "0:report of rank 0: sample 17 is broken" "0:${_first_cause}")
  ddp_add_recipe(inputs_and_outputs_refused inputs_and_outputs ${_ranks} ARGUMENTS ${_run} EXIT 70
                 OUTPUT "0:the previous backward left 1 of 5 parameters without a gradient: condition.weight")
  ddp_add_recipe(from_libtorch from_libtorch ${_ranks} ARGUMENTS ${_run} OUTPUT "0:| accuracy 100.00 %")
endforeach()
ddp_add_recipe(from_libtorch_length from_libtorch 1 ARGUMENTS ${_run} train.max_steps=5
               EXIT 64 OUTPUT "0:unknown setting 'train.max_steps'")
# 334 samples a rank: the last batch of an epoch is short.
ddp_add_recipe(from_libtorch_short_batch from_libtorch 3 ARGUMENTS ${_run} OUTPUT "0:step 34/34 |")
# 32 samples a step, however they are split, give the same loss after four steps.
foreach(_split 1:32:1 1:8:4 2:16:1 2:8:2)
  string(REPLACE ":" ";" _split ${_split})
  list(GET _split 0 _ranks)
  list(GET _split 1 _batch)
  list(GET _split 2 _micro)
  ddp_add_recipe(gradient_accumulation_${_micro} gradient_accumulation ${_ranks}
                 ARGUMENTS ${_images} train.max_steps=4 train.batch_size=${_batch}
                           train.grad_accum_steps=${_micro}
                 OUTPUT "0:step 4/4 | loss 2.5591")
endforeach()
# 32 images a step, however they are split, give the same loss after six steps. Every view is compared with the 63 others.
foreach(_ranks 1 2 4)
  ddp_add_recipe(contrastive contrastive ${_ranks}
                 ARGUMENTS ${_run} data.path=${PROJECT_SOURCE_DIR}/data/cifar10-sample data.num_samples=160
                           loader.global_batch_size=32 train.max_steps=6 metrics.log_every=6 lr_schedule.lr=0.5
                 OUTPUT "0:step 6/6 | loss 3.3856")
  # So does a backward in chunks.
  ddp_add_recipe(contrastive_chunks contrastive ${_ranks}
                 ARGUMENTS ${_run} data.path=${PROJECT_SOURCE_DIR}/data/cifar10-sample data.num_samples=160
                           loader.global_batch_size=32 train.max_steps=6 metrics.log_every=6 lr_schedule.lr=0.5
                           train.grad_accum_steps=3
                 OUTPUT "0:step 6/6 | loss 3.3856")
endforeach()
# Every sample counts once: any number of ranks gives these losses. Of four ranks two have no last batch.
foreach(_ranks 1 2 4)
  ddp_add_recipe(uneven_data uneven_data ${_ranks} ARGUMENTS ${_run} train.epochs=5 metrics.log_every=10
                 OUTPUT "0:step 10/20 | epoch 2.50 | loss 3.0203" "0:step 20/20 | epoch 5.00 | loss 0.1220")
endforeach()
# Rank 0 of several does not train, and the rows are split over the others.
foreach(_ranks 1 2 4)
  ddp_add_recipe(embedded embedded ${_ranks} OUTPUT "0:loss 0.0306107")
endforeach()
# The rows of all ranks give the weights of one process.
foreach(_ranks 1 2 4)
  ddp_add_recipe(recommender recommender ${_ranks}
                 ARGUMENTS ${_run} train.epochs=10 loader.global_batch_size=64 metrics.log_every=625
                 OUTPUT "0:step 625/1250 | epoch 5.00 | loss 0.589" "0:step 1250/1250 | epoch 10.00 | loss 0.006")
endforeach()
ddp_add_recipe(recommender_refused recommender 1 ARGUMENTS ${_run} ddp.sparse=refuse train.max_steps=1 EXIT 64
               OUTPUT "0:no parameter has sparse gradients" "0:fix: set ddp.sparse=gather")
ddp_add_recipe(own_settings own_settings 1
               ARGUMENTS ${_images} train.max_steps=3 model.hidden=32,16 model.activation=tanh train.label_smoothing=0.1
                         optimizer.beta2=0.95
               OUTPUT "0:model.activation       tanh" "0:optimizer.beta2 " "0:step 3/3 | loss ")
ddp_add_recipe(own_settings_summary own_settings 1 ARGUMENTS ${_images} train.max_steps=1 --summary
               OUTPUT "0:1  weight [64, 3072], bias [64]  Float" "0:4  weight [10, 64], bias [10] "
                      "0:197,322 parameters, 197,322 of them trained" "0: 0 elements of buffers" "0: 0.8 MiB")
ddp_add_recipe(own_settings_defaults own_settings 1 ARGUMENTS --help optimizer
               OUTPUT "0:optimizer.type=adamw" "0:optimizer.weight_decay=0.01" "0:optimizer.momentum=0")
ddp_add_recipe(own_settings_help own_settings 1 ARGUMENTS --help model
               OUTPUT "0:Between the layers." "0:Allowed: one of relu, tanh")
ddp_add_recipe(own_settings_unknown own_settings 1 ARGUMENTS ${_images} model.hiden=32
               EXIT 64 OUTPUT "0:unknown setting 'model.hiden'" "0:did you mean model.hidden?")
ddp_add_recipe(own_settings_unused own_settings 1 ARGUMENTS ${_images} train.mixup=0.2
               EXIT 64 OUTPUT "0:train.mixup=0.2 has no effect")
if(TARGET recipe_exported_model)
  # Without Python; recipes_test.py reads the weights.
  ddp_add_recipe(exported_model exported_model 2
                 ARGUMENTS ${_images} exported.path=${PROJECT_SOURCE_DIR}/data/exported-sample/cifar_net.pt2
                           exported.output=${CMAKE_CURRENT_BINARY_DIR}/exported_model.safetensors
                           train.max_steps=80 optimizer.type=adam lr_schedule.lr=0.01 loader.global_batch_size=32
                 OUTPUT "0:step 80/80 | loss 1.")
endif()
find_package(Python3 QUIET COMPONENTS Interpreter)
if(Python3_FOUND AND TARGET recipe_torchscript)
  foreach(_recipe torchscript exported_model fine_tuning gan hooks uneven_data multi_task)
    foreach(_ranks 1 2 3)
      if((_ranks EQUAL 1 OR DDP_HAS_MPI) AND (NOT _ranks EQUAL 3 OR _recipe MATCHES "^(uneven_data|multi_task)$"))
        set(_test recipe_${_recipe}_files_r${_ranks})
        add_test(NAME ${_test} COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/recipes_test.py ${_recipe}
                 $<TARGET_FILE:ddp_test_launch> $<TARGET_FILE:recipe_${_recipe}> ${_ranks})
        set_tests_properties(${_test} PROPERTIES TIMEOUT 180 SKIP_RETURN_CODE 77)
        ddp_set_ranks(${_test} ${_ranks})
      endif()
    endforeach()
  endforeach()
endif()
ddp_add_recipe(hang hang 2 ARGUMENTS context.device=cpu EXIT 70
               OUTPUT "0:first cause: rank 1 (" "0: left at step 2 in training"
                      "0: waits at step 3 in training in all_reduce #"
                      "0:where they have different numbers of batches, use ddp::join")
ddp_add_recipe(hang_joined hang 2 ARGUMENTS context.device=cpu loop.join=true OUTPUT "0:done after 4 steps")
