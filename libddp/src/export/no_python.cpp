// SPDX-License-Identifier: Apache-2.0
// libddp_no_python.so has no symbols, and the name libtorch_python.so for the dynamic linker:
// see operator_libraries.cpp.
