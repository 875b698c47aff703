# SPDX-License-Identifier: Apache-2.0
# cmake -DSOURCE=… -DHEADER=… -P DdpCommit.cmake: writes the checkout's commit to HEADER if it changed. Empty
# without git, and for sources that lie inside the checkout of another project.
set(_commit "")
execute_process(COMMAND git -C ${SOURCE} rev-parse --show-toplevel OUTPUT_VARIABLE _top RESULT_VARIABLE _failed
                OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
file(REAL_PATH ${SOURCE} _source)
if(_failed EQUAL 0 AND _top STREQUAL _source)
  execute_process(COMMAND git -C ${SOURCE} rev-parse --short=12 HEAD OUTPUT_VARIABLE _commit
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
file(CONFIGURE OUTPUT ${HEADER} CONTENT "#define DDP_COMMIT \"${_commit}\"\n")
