# SPDX-License-Identifier: Apache-2.0
# The trainers of language models as a user runs them.
function(ddp_add_language_test program scenario ranks data)
  if(TARGET ${program} AND (ranks EQUAL 1 OR DDP_HAS_MPI))
    set(_test ${program}_${scenario}_r${ranks})
    add_test(NAME ${_test} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/language_ddp_test.sh ${scenario}
             $<TARGET_FILE:${program}> ${ranks} ${PROJECT_SOURCE_DIR}/data/${data})
    set_tests_properties(${_test} PROPERTIES TIMEOUT 240)
    ddp_set_ranks(${_test} ${ranks})
  endif()
endfunction()
foreach(_case learns:2 curve:4 resumes:1 resumes:2 stops:2 keeps:1 evaluates:2 whole:2 refuses:1)
  string(REPLACE ":" ";" _case ${_case})
  ddp_add_language_test(lora_ddp ${_case} chat-sample)
endforeach()
foreach(_case learns:2 curve:4 resumes:1)
  string(REPLACE ":" ";" _case ${_case})
  ddp_add_language_test(gpt2_ddp ${_case} text-sample)
endforeach()
foreach(_case learns:2 curve:4 resumes:1 resumes:2 refuses:1)
  string(REPLACE ":" ";" _case ${_case})
  ddp_add_language_test(bert_ddp ${_case} masked-text-sample)
endforeach()
find_package(Python3 QUIET COMPONENTS Interpreter)
if(TARGET lora_ddp AND Python3_FOUND)
  add_test(NAME lora_ddp_peft COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/lora_ddp_peft.py
           $<TARGET_FILE:lora_ddp> ${PROJECT_SOURCE_DIR}/data/chat-sample)
  set_tests_properties(lora_ddp_peft PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 240)
endif()
if(TARGET lora_ddp AND TARGET gpt2_ddp AND Python3_FOUND)
  set(_mpirun "")
  if(DDP_HAS_MPI)
    set(_mpirun mpirun)
  endif()
  foreach(_case prompt chat protocol)
    add_test(NAME tool_chat_${_case}
             COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/chat_test.py ${PROJECT_BINARY_DIR} ${_case}
             ${_mpirun})
    set_tests_properties(tool_chat_${_case} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 240
                         ENVIRONMENT "PYTHONDONTWRITEBYTECODE=1")
  endforeach()
endif()
if(TARGET bert_ddp AND Python3_FOUND)
  add_test(NAME bert_ddp_pretrained COMMAND ${Python3_EXECUTABLE}
           ${CMAKE_CURRENT_SOURCE_DIR}/bert_ddp_pretrained.py $<TARGET_FILE:bert_ddp> ${PROJECT_SOURCE_DIR})
  set_tests_properties(bert_ddp_pretrained PROPERTIES TIMEOUT 120)
endif()
if(TARGET gpt2_ddp AND TARGET bert_ddp AND TARGET vit_ddp AND Python3_FOUND)
  add_test(NAME transformers_train_like_pytorch COMMAND ${Python3_EXECUTABLE}
           ${CMAKE_CURRENT_SOURCE_DIR}/transformers_train_like_pytorch.py ${PROJECT_BINARY_DIR} ${PROJECT_SOURCE_DIR})
  set_tests_properties(transformers_train_like_pytorch PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 240
                       ENVIRONMENT "PYTHONDONTWRITEBYTECODE=1")
endif()
if(TARGET ddp_examples_language)
  ddp_add_test(NAME decode_prompts SOURCES decode_prompts_test.cpp RANKS 1 2 TIMEOUT 60
               LIBRARIES ddp_examples_language)
endif()
