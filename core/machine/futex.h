// Sleeping on a 32-bit word (futex(2)), private to the process.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace cpumoe {

// True when another thread woke us; false when the word differed from `expected` or a signal came.
inline bool futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0) == 0;
}
// Wakes at most `count` sleepers; returns how many.
inline int futex_wake(std::atomic<uint32_t>& word, int count) {
  const long woken = syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
  return woken > 0 ? int(woken) : 0;
}

}  // namespace cpumoe
