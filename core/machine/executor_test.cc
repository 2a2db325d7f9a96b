#include "machine/executor.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "base/error.h"
#include "testing/test.h"

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN true
#else
#define UNDER_TSAN false
#endif

namespace cpumoe {
namespace {

Machine machine_with(int cores, double quota = 0) {
  Machine machine;
  for (int i = 0; i < cores; ++i) machine.cores.push_back({0, {i}});
  machine.cgroup_cpus = quota;
  return machine;
}

Executor::Options options_with(int threads, int spin_us = -1) {
  Executor::Options options;
  options.threads = threads;
  options.spin_us = spin_us;
  return options;
}

// Waits up to ten seconds: a lost wake-up must fail the test, not hang it.
template <class Ready>
bool eventually(const Ready& ready) {
  for (int i = 0; i < 100000; ++i) {
    if (ready()) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return false;
}

TEST(runs_each_task_once_and_no_worker_twice_at_once) {
  for (int threads : {1, 2, 3, 8, 32}) {
    for (int spin_us : {0, 50}) {
      Executor executor(machine_with(4), options_with(threads, spin_us));
      CHECK_EQ(executor.threads(), threads);
      for (int64_t count : {0, 1, 2, 7, 1000}) {
        std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
        std::vector<std::atomic<int>> busy(static_cast<size_t>(threads));
        executor.parallel(count, [&](int64_t task, int worker) {
          CHECK(worker >= 0 && worker < threads);
          CHECK_EQ(busy[size_t(worker)].exchange(1), 0);
          runs[size_t(task)].fetch_add(1);
          busy[size_t(worker)].store(0);
        });
        for (const std::atomic<int>& r : runs) CHECK_EQ(r.load(), 1);
      }
    }
  }
}

// Ends of `lanes` lanes of `count` tasks, some of them empty.
std::vector<int64_t> lane_ends(int64_t lanes, int64_t count) {
  std::vector<int64_t> ends;
  for (int64_t i = 1; i <= lanes; ++i) {
    ends.push_back(i == lanes ? count : count * i * i / (lanes * lanes));
  }
  return ends;
}

TEST(lanes_run_each_task_once) {
  for (int threads : {1, 2, 3, 8, 32}) {
    for (int spin_us : {0, 50}) {
      Executor executor(machine_with(4), options_with(threads, spin_us));
      CHECK_EQ(executor.at_once(), std::min(threads, 4));
      for (int64_t count : {0, 1, 2, 7, 1000}) {
        for (int lanes = 1; lanes <= executor.at_once(); ++lanes) {
          std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
          executor.parallel(lane_ends(lanes, count),
                            [&](int64_t task, int) { runs[size_t(task)].fetch_add(1); });
          for (const std::atomic<int>& r : runs) CHECK_EQ(r.load(), 1);
        }
      }
      CHECK_THROWS(executor.parallel(lane_ends(executor.at_once() + 1, 100), [](int64_t, int) {}),
                   "there must be at most");
      CHECK_THROWS(executor.parallel(std::array<int64_t, 1>{-1}, [](int64_t, int) {}),
                   "number of tasks must be from 0");
    }
  }
}

// Two workers that wait for one another at every step stay in their lanes, in order.
TEST(a_worker_runs_through_a_lane) {
  Executor executor(machine_with(2), options_with(2));
  constexpr int64_t kEach = 50;
  const std::array<int64_t, 2> ends = {kEach, 2 * kEach};
  std::atomic<int> step{0};
  std::array<std::vector<int64_t>, 2> seen;
  executor.parallel(ends, [&](int64_t task, int worker) {
    const int turn = step.fetch_add(1) / 2;
    CHECK(eventually([&] { return step.load() >= 2 * (turn + 1); }));
    seen[size_t(worker)].push_back(task);
  });
  for (const std::vector<int64_t>& tasks : seen) {
    CHECK_EQ(int64_t(tasks.size()), kEach);
    for (size_t i = 0; i < tasks.size(); ++i) CHECK_EQ(tasks[i] - tasks[0], int64_t(i));
  }
}

// One worker is stuck in its first task: the other finishes its own lane and then, from the far
// end, the first one's.
TEST(lanes_are_helped_from_their_far_end) {
  Executor executor(machine_with(2), options_with(2));
  const std::array<int64_t, 2> ends = {20, 40};
  std::atomic<int> done{0};
  std::vector<int64_t> order;  // of the worker that is not stuck
  std::atomic<int64_t> stuck{-1};
  executor.parallel(ends, [&](int64_t task, int) {
    int64_t none = -1;
    if (stuck.compare_exchange_strong(none, task)) {
      CHECK(eventually([&] { return done.load() == 39; }));
      return;
    }
    order.push_back(task);
    done.fetch_add(1);
  });
  const int64_t own = stuck.load() == 0 ? 20 : 0, other = 20 - own;
  CHECK_EQ(stuck.load(), other);
  CHECK_EQ(order.size(), size_t(39));
  for (int64_t i = 0; i < 20; ++i) CHECK_EQ(order[size_t(i)], own + i);
  for (int64_t i = 20; i < 39; ++i) CHECK_EQ(order[size_t(i)], other + 19 - (i - 20));
}

// Every phase has its own closure and data on the stack: a worker that is late by a phase would
// call a dead closure or lose a sum.
TEST(late_workers_never_touch_another_phase) {
  for (int spin_us : {0, 50}) {
    Executor executor(machine_with(4), options_with(4, spin_us));
    const int phases = UNDER_TSAN ? 3000 : 20000;
    for (int phase = 0; phase < phases; ++phase) {
      const int64_t count = 1 + phase % 9;
      int64_t slot[9] = {};
      const auto task = [&, phase](int64_t i, int) { slot[i] = phase + i + 1; };
      if (phase % 2 == 0) {
        executor.parallel(count, task);
      } else {
        executor.parallel(lane_ends(1 + phase / 2 % 4, count), task);
      }
      for (int64_t i = 0; i < 9; ++i) CHECK_EQ(slot[i], i < count ? phase + i + 1 : 0);
    }
  }
}

TEST(rethrows_the_first_exception_after_all_tasks_ended) {
  for (int threads : {1, 4}) {
    Executor executor(machine_with(4), options_with(threads));
    std::atomic<int> ended{0};
    CHECK_THROWS(executor.parallel(100,
                                   [&](int64_t task, int) {
                                     ended.fetch_add(1);
                                     if (task % 10 == 3) throw Error("task failed");
                                   }),
                 "task failed");
    CHECK_EQ(ended.load(), 100);
    executor.parallel(10, [&](int64_t, int) { ended.fetch_add(1); });  // nothing left over
    CHECK_EQ(ended.load(), 110);
  }
}

TEST(refuses_nested_calls_and_bad_numbers) {
  for (int threads : {1, 3}) {
    Executor executor(machine_with(4), options_with(threads));
    CHECK_THROWS(executor.parallel(
                     5, [&](int64_t, int) { executor.parallel(2, [](int64_t, int) {}); }),
                 "must not call parallel() itself");
    CHECK_THROWS(executor.parallel(-1, [](int64_t, int) {}), "number of tasks must be from 0");
    CHECK_THROWS(executor.parallel(int64_t{1} << 40, [](int64_t, int) {}), "got 1099511627776");
  }
  CHECK_THROWS(Executor(machine_with(2), options_with(-1)), "threads must be from 1");
  CHECK_THROWS(Executor(machine_with(2), options_with(kMaxThreads + 1)), "got 1025");
  CHECK_THROWS(Executor(machine_with(2), options_with(2, -2)), "spin_us must be at least 0");
}

TEST(default_thread_count_follows_the_machine) {
  CHECK_EQ(Executor(machine_with(3), {}).threads(), 3);
  CHECK_EQ(Executor(machine_with(3, 1.5), {}).threads(), 2);
  CHECK_EQ(Executor(machine_with(3, 0.2), {}).threads(), 1);
}

// Two tasks that wait for one another need two workers at once.
void rendezvous(Executor& executor) {
  std::atomic<int> here{0};
  executor.parallel(2, [&](int64_t, int) {
    here.fetch_add(1);
    CHECK(eventually([&] { return here.load() == 2; }));
  });
}

TEST(sleeping_workers_are_woken) {
  Executor executor(machine_with(2), options_with(2));
  const bool slept = eventually([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // far over the time of spinning
    rendezvous(executor);
    return executor.wakes() >= 3;
  });
  CHECK(slept);
}

TEST(spinning_workers_need_no_wake) {
  Executor executor(machine_with(2), options_with(2, 1000000));
  for (int i = 0; i < 100; ++i) rendezvous(executor);
  CHECK_EQ(executor.wakes(), 0);
}

// What keeps threads >> cores from collapsing: a phase wakes at most (usable cores - 1) workers.
TEST(oversubscription_wakes_few_workers) {
  struct Case {
    int cores;
    double quota;
    int threads;
    int64_t wakes_per_phase;
  };
  for (const Case& c : {Case{2, 0, 8, 1}, Case{2, 0, 32, 1}, Case{16, 1.5, 16, 1}, Case{1, 0, 8, 0},
                        Case{3, 0, 32, 2}}) {
    Executor executor(machine_with(c.cores, c.quota), options_with(c.threads, 0));
    const int phases = 300;
    for (int i = 0; i < phases; ++i) {
      std::atomic<int> done{0};
      executor.parallel(64, [&](int64_t, int) { done.fetch_add(1); });
      CHECK_EQ(done.load(), 64);
    }
    CHECK_LE(executor.wakes(), phases * c.wakes_per_phase);
  }
}

TEST(callers_take_turns) {
  Executor executor(machine_with(4), options_with(3));
  std::array<std::atomic<int>, 4> running{};  // tasks of each caller that are being run
  std::atomic<int> mixed{0}, lost{0};
  std::vector<std::thread> callers;
  for (size_t caller = 0; caller < running.size(); ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 200; ++i) {
        int64_t sum[8] = {};
        executor.parallel(8, [&](int64_t task, int) {
          running[caller].fetch_add(1);
          for (size_t other = 0; other < running.size(); ++other) {
            if (other != caller && running[other].load() != 0) mixed.fetch_add(1);
          }
          sum[task] = task;
          running[caller].fetch_sub(1);
        });
        if (std::accumulate(sum, sum + 8, int64_t(0)) != 28) lost.fetch_add(1);
      }
    });
  }
  for (std::thread& t : callers) t.join();
  CHECK_EQ(mixed.load(), 0);
  CHECK_EQ(lost.load(), 0);
}

TEST(starts_and_stops_at_any_moment) {
  for (int i = 0; i < 50; ++i) {
    Executor executor(machine_with(4), options_with(1 + i % 5, i % 2 == 0 ? 0 : 50));
    if (i % 3 != 0) executor.parallel(i, [](int64_t, int) {});
  }
}

TEST(works_in_a_forked_child) {
  if (UNDER_TSAN) SKIP("ThreadSanitizer forbids threads after fork()");
  Executor executor(machine_with(4), options_with(3));
  rendezvous(executor);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    int status = 1;
    try {
      rendezvous(executor);
      std::atomic<int> done{0};
      executor.parallel(100, [&](int64_t, int) { done.fetch_add(1); });
      status = done.load() == 100 ? 0 : 2;
    } catch (...) {
    }
    _exit(status);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  rendezvous(executor);
}

}  // namespace
}  // namespace cpumoe
