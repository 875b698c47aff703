# SPDX-License-Identifier: Apache-2.0
# The wheel is built with the torch of the Python that builds it, because its metadata require this version.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
  OUTPUT_VARIABLE LIBTORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
