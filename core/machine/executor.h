// Workers that run numbered tasks from a dynamic queue or lanes. The caller is worker 0. A phase ends when
// its tasks are done, not when every worker has shown up, so a worker that the kernel has
// descheduled between tasks delays nobody. Workers spin for a short while after a phase, then
// sleep. No more of them are woken than machine.default_threads() can run at once, so threads in
// excess cost nothing.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

#include "machine/machine.h"

namespace cpumoe {

class Executor {
 public:
  struct Options {
    int threads = 0;  // 0: machine.default_threads()
    // With several nodes: bind worker i > 0 to the node of the i-th core (never when threads exceed
    // the cores). Not to the core: the caller runs where it likes, and a worker bound to that core
    // would share it with the caller.
    bool pin = true;
    int spin_us = -1;  // how long an idle worker spins before it sleeps; -1: 50
  };
  Executor(const Machine& machine, Options options);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  int threads() const;
  // Workers that may run at once: threads(), or the cores where they are fewer.
  int at_once() const;
  // Times that a sleeping worker was woken so far (tests, doctor). A phase wakes at most cores - 1.
  int64_t wakes() const;

  // Calls fn(task, worker) once for each task in 0..count-1, in any order and on any worker, and
  // returns when all are done. worker is in 0..threads()-1; no two tasks run on one worker at once.
  // The first exception thrown by a task is rethrown here, after the others have ended. Calls from
  // several threads are served one after the other; a task must not call parallel() itself.
  template <class F>
  void parallel(int64_t count, F&& fn) {
    using Fn = std::remove_reference_t<F>;
    run(count, {}, [](void* f, int64_t task, int worker) { (*static_cast<Fn*>(f))(task, worker); },
        const_cast<void*>(static_cast<const void*>(&fn)));
  }

  // The same for tasks in at most at_once() lanes, of which lane l holds [lane_ends[l - 1],
  // lane_ends[l]), the first one from 0: a worker runs through a lane that nobody else has begun,
  // task after task, and helps at the far ends of others when all are begun. For tasks that go on
  // where the one before them has ended.
  template <class F>
  void parallel(std::span<const int64_t> lane_ends, F&& fn) {
    using Fn = std::remove_reference_t<F>;
    run(lane_ends.empty() ? 0 : lane_ends.back(), lane_ends,
        [](void* f, int64_t task, int worker) { (*static_cast<Fn*>(f))(task, worker); },
        const_cast<void*>(static_cast<const void*>(&fn)));
  }

 private:
  void run(int64_t count, std::span<const int64_t> lane_ends, void (*call)(void*, int64_t, int),
           void* fn);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cpumoe
