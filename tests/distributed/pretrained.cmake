# SPDX-License-Identifier: Apache-2.0
ddp_add_test(NAME pretrained SOURCES pretrained_test.cpp RANKS 1 2 4 TIMEOUT 60
             LIBRARIES ddp_pretrained ddp_models ddp nlohmann_json::nlohmann_json)
