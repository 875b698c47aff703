// SPDX-License-Identifier: Apache-2.0
// Carries the precompiled header; see DdpDependencies.cmake and DdpSharedPch.cmake.
