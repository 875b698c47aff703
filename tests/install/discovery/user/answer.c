// SPDX-License-Identifier: Apache-2.0
int answer(void);
int answer(void) {
  return 42;
}
