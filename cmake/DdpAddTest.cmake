# SPDX-License-Identifier: Apache-2.0
# ddp_add_test(NAME name SOURCES a.cpp … [RANKS 1 2 4] [LABELS …] [TIMEOUT seconds] [LIBRARIES …]
#              [UNDER_LOCALE [filter]])
#
# UNDER_LOCALE: registered a second time as NAME_locale, which runs in a program whose locale groups
# digits (support/grouping_locale.hpp). For tests of files, names, messages and command lines. The
# filter (of Catch2) leaves out cases that neither write nor parse numbers; a second run over 5 s
# needs one.
# Without RANKS: one Catch2 program, one ctest test NAME. With RANKS: the program is linked with the
# multi-rank main (support/multi_rank_main.hpp) and registered as NAME_r1, NAME_r2, …, each started
# through ddp_test_launch, which fails if any rank fails.
function(ddp_add_test)
  cmake_parse_arguments(arg "" "NAME;TIMEOUT;UNDER_LOCALE" "SOURCES;RANKS;LABELS;LIBRARIES" ${ARGN})
  set(_locale_arguments)
  if(arg_UNDER_LOCALE)
    set(_locale_arguments ${arg_UNDER_LOCALE})
    if(Catch2_VERSION VERSION_LESS 3)  # which passes where the filter leaves no test
      list(PREPEND _locale_arguments --warn NoTests)
    endif()
  elseif("UNDER_LOCALE" IN_LIST arg_KEYWORDS_MISSING_VALUES)
    set(arg_UNDER_LOCALE ON)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(NOT arg_LIBRARIES)
    set(arg_LIBRARIES ddp)
  endif()
  if(DDP_CORE_ONLY AND (arg_RANKS OR arg_LIBRARIES MATCHES "(^|;)ddp(_ops|_models)?(;|$)"))
    add_executable(${arg_NAME} EXCLUDE_FROM_ALL ${arg_SOURCES})  # a name for the lines that follow
    return()
  endif()
  add_executable(${arg_NAME} ${arg_SOURCES})
  target_link_libraries(${arg_NAME} PRIVATE ${arg_LIBRARIES} ddp_warnings)
  target_include_directories(${arg_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/tests ${DDP_PRIVATE_INCLUDES})
  if(ddp IN_LIST arg_LIBRARIES OR ddp_models IN_LIST arg_LIBRARIES)
    ddp_use_pch(${arg_NAME} TEST)
  endif()
  if(arg_RANKS)
    target_link_libraries(${arg_NAME} PRIVATE ddp_test_multi_rank_main)
    foreach(_ranks ${arg_RANKS})
      ddp_add_launch(NAME ${arg_NAME}_r${_ranks} PROGRAM ${arg_NAME} RANKS ${_ranks}
                     LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT})
    endforeach()
    if(arg_UNDER_LOCALE)
      list(GET arg_RANKS -1 _ranks)
      ddp_add_launch(NAME ${arg_NAME}_r${_ranks}_locale PROGRAM ${arg_NAME} RANKS ${_ranks}
                     ARGUMENTS ${_locale_arguments} LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT})
      set_tests_properties(${arg_NAME}_r${_ranks}_locale PROPERTIES ENVIRONMENT DDP_TEST_LOCALE=grouping)
    endif()
  elseif("gpu" IN_LIST arg_LABELS)
    target_link_libraries(${arg_NAME} PRIVATE ddp_test_main)
    ddp_add_launch(NAME ${arg_NAME} PROGRAM ${arg_NAME} RANKS 1 LABELS ${arg_LABELS}
                   TIMEOUT ${arg_TIMEOUT})
  else()
    target_link_libraries(${arg_NAME} PRIVATE ddp_test_main)
    set(_tests ${arg_NAME})
    add_test(NAME ${arg_NAME} COMMAND ${arg_NAME})
    if(arg_UNDER_LOCALE)
      list(APPEND _tests ${arg_NAME}_locale)
      add_test(NAME ${arg_NAME}_locale COMMAND ${arg_NAME} ${_locale_arguments})
    endif()
    foreach(_test ${_tests})
      set_tests_properties(${_test} PROPERTIES TIMEOUT ${arg_TIMEOUT} SKIP_RETURN_CODE 77)
      set_property(TEST ${_test} PROPERTY LABELS ${arg_LABELS})
    endforeach()
    if(arg_UNDER_LOCALE)
      set_tests_properties(${arg_NAME}_locale PROPERTIES ENVIRONMENT DDP_TEST_LOCALE=grouping)
      # One program twice: each would look for free ports at the same time.
      set_tests_properties(${_tests} PROPERTIES RESOURCE_LOCK ${arg_NAME})
    endif()
  endif()
endfunction()

# ddp_set_ranks(test ranks): how many cores ctest keeps for a test. Ranks wait for each other and for files, so up to
# four of them use at most two cores. Their tests have a cost, so that they start first, each beside a test of one
# process: at the end of a run they would leave cores idle.
function(ddp_set_ranks test ranks)
  if(ranks GREATER 1)
    set_tests_properties(${test} PROPERTIES PROCESSORS 2 COST ${ranks})
  endif()
endfunction()

# ddp_start_early(test…): long tests of one process. They start after those of several ranks, beside them: last, each
# would leave the other cores idle.
function(ddp_start_early)
  set_tests_properties(${ARGN} PROPERTIES COST 1)
endfunction()

# ddp_add_launch(NAME test PROGRAM target [ARGUMENTS …] RANKS n [OPTIONS …] [LABELS …] [TIMEOUT seconds] [UNHURRIED])
#
# One ctest test: PROGRAM as n ranks through ddp_test_launch with its OPTIONS (--expect-exit, --launch …).
# The label gpu starts them without MPI, one GPU a rank, and skips where fewer are seen; such tests
# have the GPUs for themselves. Several CPU ranks are skipped in a build without MPI, unless OPTIONS
# start them without it. Ranks with --expect-exit have the cores for themselves, except UNHURRIED ones: they may end
# late, and no heartbeat of theirs is shorter than the default.
function(ddp_add_launch)
  cmake_parse_arguments(arg "UNHURRIED" "NAME;PROGRAM;RANKS;TIMEOUT" "ARGUMENTS;OPTIONS;LABELS" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if("gpu" IN_LIST arg_LABELS)
    list(APPEND arg_OPTIONS --gpus)
  endif()
  if(NOT DDP_HAS_MPI AND NOT "gpu" IN_LIST arg_LABELS AND NOT "--launch" IN_LIST arg_OPTIONS)
    if(arg_RANKS EQUAL 1)
      list(APPEND arg_OPTIONS --launch env)
    else()
      list(APPEND arg_OPTIONS --skip "several CPU ranks need MPI, which this build lacks")
    endif()
  endif()
  add_dependencies(${arg_PROGRAM} ddp_test_launch)
  add_test(NAME ${arg_NAME} COMMAND ddp_test_launch --ranks ${arg_RANKS} --timeout ${arg_TIMEOUT}
           ${arg_OPTIONS} -- $<TARGET_FILE:${arg_PROGRAM}> ${arg_ARGUMENTS})
  # The launcher ends the ranks itself; CTest's own limit is for a launcher that hangs.
  math(EXPR _limit "${arg_TIMEOUT} + 20")
  set_tests_properties(${arg_NAME} PROPERTIES TIMEOUT ${_limit} SKIP_RETURN_CODE 77)
  ddp_set_ranks(${arg_NAME} ${arg_RANKS})
  if("--expect-exit" IN_LIST arg_OPTIONS AND arg_RANKS GREATER 1 AND NOT arg_UNHURRIED)
    # How ranks end within a time: on cores of their own, of which test.sh counts one too many.
    math(EXPR _slots "${arg_RANKS} + 1")
    set_tests_properties(${arg_NAME} PROPERTIES PROCESSORS ${_slots})
  endif()
  set_property(TEST ${arg_NAME} PROPERTY LABELS ${arg_LABELS})
  if("gpu" IN_LIST arg_LABELS)
    set_tests_properties(${arg_NAME} PROPERTIES RESOURCE_LOCK gpu)
  endif()
endfunction()

# ddp_hide_gpus(folder): tests of `folder` and of those below it without the label gpu see no GPU. A program with
# context.device=auto then computes the same on every machine.
function(ddp_hide_gpus folder)
  get_property(_tests DIRECTORY ${folder} PROPERTY TESTS)
  foreach(_test ${_tests})
    get_property(_labels TEST ${_test} DIRECTORY ${folder} PROPERTY LABELS)
    if(NOT "gpu" IN_LIST _labels)
      set_property(TEST ${_test} DIRECTORY ${folder} PROPERTY ENVIRONMENT_MODIFICATION CUDA_VISIBLE_DEVICES=set:)
    endif()
  endforeach()
  get_property(_below DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
  foreach(_folder ${_below})
    ddp_hide_gpus(${_folder})
  endforeach()
endfunction()
