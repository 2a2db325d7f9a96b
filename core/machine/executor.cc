// One phase: the caller writes the job, then sets `remaining` to the number of tasks. A worker
// claims a task by decrementing a positive `remaining`; only then does it read the job. The job
// cannot change before that task is reported in `unfinished`, so a worker that wakes late either
// claims a task of the job that is running now or nothing at all. The phase ends when no task
// is unfinished.
//
// Lanes: the claim says that a task is left, the lanes which. They are written before `remaining`,
// and an empty lane stays empty until the phase ends, so whoever holds a claim and has found all
// other lanes empty finds a task in the last one.
#include "machine/executor.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "machine/futex.h"

namespace cpumoe {
namespace {

constexpr int64_t kMaxTasks = int64_t{1} << 30;  // `remaining` holds 32 bits
constexpr int kSpinMicroseconds = 50;              // longer than the serial parts of a decode step
constexpr int kSpinsPerLook = 32;                  // pauses between two looks at the clock

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Spins until ready() or until `microseconds` are over; says whether it was ready.
template <class Ready>
bool spin(int microseconds, const Ready& ready) {
  if (ready()) return true;
  if (microseconds <= 0) return false;
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + std::chrono::microseconds(microseconds);
  do {
    for (int i = 0; i < kSpinsPerLook; ++i) {
      pause_cpu();
      if (ready()) return true;
    }
  } while (Clock::now() < end);
  return false;
}

struct Pool {
  struct Job {
    void (*call)(void*, int64_t, int) = nullptr;
    void* fn = nullptr;
    int32_t count = 0;
    int32_t lanes = 0;  // 0: tasks are taken in order
  };
  // Tasks [first, last) of a lane that nobody has taken: first in the lower 32 bits.
  struct alignas(128) Lane {
    std::atomic<uint64_t> left{0};
  };

  // Written by workers all the time: one cache line each (128: the prefetcher takes line pairs).
  alignas(128) std::atomic<int32_t> remaining{0};    // tasks not yet claimed; <= 0: none
  alignas(128) std::atomic<uint32_t> unfinished{0};  // tasks not yet reported; the caller waits
  alignas(128) std::atomic<int> sleepers{0};         // workers that a futex_wake may be needed for
  std::atomic<uint32_t> wake_word{0};                // sleeping workers sleep on it
  std::atomic<bool> caller_sleeps{false};
  std::atomic<bool> stop{false};
  alignas(128) Job job;
  std::unique_ptr<Lane[]> lanes;  // [awake_limit + 1]
  std::atomic<int32_t> begun{0};  // lanes that a worker has made its own
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  std::atomic<int64_t> wakes{0};

  std::mutex turn;  // one job at a time
  int threads = 1;
  int awake_limit = 0;  // workers, beside the caller, that may be awake at once
  int spin_us = 0;
  std::vector<std::vector<int>> cpus_of_worker;  // empty: not bound
  std::vector<pthread_t> workers;

  void start();
  void finish();
  void run(const Job& next, std::span<const int64_t> lane_ends);
  int64_t take_from_lanes(int32_t& own);
  void call_task(int64_t task, int worker);
  void work(int worker);
  void wake_workers();
  void wait_for_end();
  void worker_loop(int worker);
  void sleep_until_work();
};

// The executor whose task this thread is running.
thread_local const Pool* t_running = nullptr;

struct WorkerStart {
  Pool* pool;
  int worker;
};

std::vector<int> cpus_of_node(const Machine& machine, int node) {
  std::vector<int> cpus;
  for (const Core& core : machine.cores) {
    if (core.node == node) cpus.insert(cpus.end(), core.cpus.begin(), core.cpus.end());
  }
  return cpus;
}

void bind_to(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  const size_t size = size_t(*std::max_element(cpus.begin(), cpus.end())) + 1;
  cpu_set_t* mask = CPU_ALLOC(size);
  if (mask == nullptr) return;
  const size_t bytes = CPU_ALLOC_SIZE(size);
  CPU_ZERO_S(bytes, mask);
  for (int c : cpus) CPU_SET_S(size_t(c), bytes, mask);
  // Refused (a CPU went away, a sandbox): the worker runs unbound, as correct as before.
  pthread_setaffinity_np(pthread_self(), bytes, mask);
  CPU_FREE(mask);
}

void* worker_main(void* argument) {
  const std::unique_ptr<WorkerStart> start(static_cast<WorkerStart*>(argument));
  Pool& pool = *start->pool;
  if (!pool.cpus_of_worker.empty()) bind_to(pool.cpus_of_worker[size_t(start->worker)]);
  pool.worker_loop(start->worker);
  return nullptr;
}

void Pool::start() {
  for (int i = 1; i < threads; ++i) {
    auto argument = std::make_unique<WorkerStart>(WorkerStart{this, i});
    pthread_t thread;
    const int error = pthread_create(&thread, nullptr, worker_main, argument.get());
    if (error != 0) {
      finish();
      throw Error(concat("Executor: the system must allow ", threads, " threads; got error ", error,
                         " at thread ", i, ". Ask for fewer threads."));
    }
    argument.release();
    workers.push_back(thread);
  }
}

void Pool::finish() {
  stop.store(true);
  wake_word.fetch_add(1);
  futex_wake(wake_word, threads);
  for (pthread_t thread : workers) pthread_join(thread, nullptr);
  workers.clear();
}

void Pool::call_task(int64_t task, int worker) {
  try {
    job.call(job.fn, task, worker);
  } catch (...) {
    if (!failed.exchange(true)) error = std::current_exception();
  }
}

uint64_t pack_lane(int64_t first, int64_t last) { return uint64_t(last) << 32 | uint64_t(first); }

// A task of the lane, or -1: the first one, or the last.
int64_t take(std::atomic<uint64_t>& lane, bool first) {
  uint64_t left = lane.load(std::memory_order_relaxed);
  for (;;) {
    const int64_t begin = int64_t(left & 0xffffffff), end = int64_t(left >> 32);
    if (begin >= end) return -1;
    const uint64_t less = first ? pack_lane(begin + 1, end) : pack_lane(begin, end - 1);
    if (lane.compare_exchange_weak(left, less, std::memory_order_relaxed)) {
      return first ? begin : end - 1;
    }
  }
}

// For the holder of a claim. own: its lane; -1 before it has one, job.lanes once all are begun.
int64_t Pool::take_from_lanes(int32_t& own) {
  while (own < job.lanes) {
    const int64_t task = own < 0 ? -1 : take(lanes[size_t(own)].left, true);
    if (task >= 0) return task;
    own = std::min(begun.fetch_add(1, std::memory_order_relaxed), job.lanes);
  }
  for (int32_t i = 0;; i = (i + 1) % job.lanes) {
    const int64_t task = take(lanes[size_t(i)].left, false);
    if (task >= 0) return task;
  }
}

// Claims and runs tasks until none is left, then reports them all at once.
void Pool::work(int worker) {
  uint32_t mine = 0;
  int32_t lane = -1;
  while (remaining.load(std::memory_order_relaxed) > 0) {
    const int32_t left = remaining.fetch_sub(1, std::memory_order_acq_rel);
    if (left <= 0) break;
    call_task(job.lanes > 0 ? take_from_lanes(lane) : job.count - left, worker);
    ++mine;
  }
  if (mine == 0) return;
  if (unfinished.fetch_sub(mine, std::memory_order_seq_cst) == mine &&
      caller_sleeps.load(std::memory_order_seq_cst)) {
    futex_wake(unfinished, 1);
  }
}

void Pool::wake_workers() {
  const int sleeping = sleepers.load(std::memory_order_seq_cst);
  if (sleeping <= 0) return;
  const int awake = threads - 1 - sleeping;
  const int wanted = std::min<int>(awake_limit, job.count - 1) - awake;
  if (wanted <= 0) return;
  wake_word.fetch_add(1);
  const int woken = futex_wake(wake_word, std::min(wanted, sleeping));
  sleepers.fetch_sub(woken);
  wakes.fetch_add(woken, std::memory_order_relaxed);
}

void Pool::wait_for_end() {
  const auto over = [this] { return unfinished.load(std::memory_order_acquire) == 0; };
  if (spin(spin_us, over)) return;
  caller_sleeps.store(true, std::memory_order_seq_cst);
  for (;;) {
    const uint32_t left = unfinished.load(std::memory_order_seq_cst);
    if (left == 0) break;
    futex_wait(unfinished, left);
  }
  caller_sleeps.store(false, std::memory_order_relaxed);
}

void Pool::run(const Job& next, std::span<const int64_t> lane_ends) {
  job = next;
  if (threads == 1 || next.count == 1) {
    for (int32_t i = 0; i < next.count; ++i) call_task(i, 0);
    return;
  }
  for (size_t i = 0; i < lane_ends.size(); ++i) {
    lanes[i].left.store(pack_lane(i == 0 ? 0 : lane_ends[i - 1], lane_ends[i]),
                        std::memory_order_relaxed);
  }
  begun.store(0, std::memory_order_relaxed);
  unfinished.store(uint32_t(next.count), std::memory_order_relaxed);
  // seq_cst, as the load of `sleepers` behind it: either we see a worker that is about to sleep, or
  // it sees our tasks.
  remaining.store(next.count, std::memory_order_seq_cst);
  wake_workers();
  work(0);
  wait_for_end();
}

void Pool::sleep_until_work() {
  const uint32_t seen = wake_word.load(std::memory_order_seq_cst);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const bool busy = remaining.load(std::memory_order_seq_cst) > 0 || stop.load();
  // Whoever wakes a sleeper takes it off the count, so nobody calls the kernel for it once more.
  if (busy || !futex_wait(wake_word, seen)) sleepers.fetch_sub(1);
}

void Pool::worker_loop(int worker) {
  const auto called = [this] {
    return remaining.load(std::memory_order_relaxed) > 0 || stop.load(std::memory_order_relaxed);
  };
  while (!stop.load(std::memory_order_relaxed)) {
    if (spin(spin_us, called)) {
      t_running = this;
      work(worker);
      t_running = nullptr;
    } else {
      sleep_until_work();
    }
  }
}

// fork() copies only the thread that called it. The child's executors are rebuilt on first use; the
// parent's pools stay behind unused, because their threads and perhaps their locks are gone.
std::mutex g_fork_mutex;
std::atomic<uint64_t> g_forks{0};

void watch_forks() {
  static const int once = pthread_atfork([] { g_fork_mutex.lock(); }, [] { g_fork_mutex.unlock(); },
                                         [] {
                                           g_forks.fetch_add(1);
                                           t_running = nullptr;
                                           g_fork_mutex.unlock();
                                         });
  static_cast<void>(once);
}

}  // namespace

struct Executor::Impl {
  Machine machine;
  Options options;
  int threads = 1;
  std::atomic<uint64_t> forks{0};  // g_forks when `pool` was made
  std::atomic<Pool*> pool{nullptr};

  int at_once() const { return std::min(threads, machine.default_threads()); }

  Pool* make_pool() const {
    auto made = std::make_unique<Pool>();
    made->threads = threads;
    made->awake_limit = at_once() - 1;
    made->lanes = std::make_unique<Pool::Lane[]>(size_t(at_once()));
    made->spin_us = options.spin_us >= 0 ? options.spin_us : kSpinMicroseconds;
    if (options.pin && machine.nodes > 1 && threads <= int(machine.cores.size())) {
      for (int i = 0; i < threads; ++i) {
        made->cpus_of_worker.push_back(cpus_of_node(machine, machine.cores[size_t(i)].node));
      }
    }
    made->start();
    return made.release();
  }

  Pool& current() {
    if (forks.load(std::memory_order_acquire) != g_forks.load(std::memory_order_relaxed)) {
      const std::lock_guard<std::mutex> lock(g_fork_mutex);
      if (forks != g_forks.load()) {
        pool.store(make_pool());
        forks = g_forks.load();
      }
    }
    return *pool.load(std::memory_order_acquire);
  }
};

Executor::Executor(const Machine& machine, Options options) : impl_(std::make_unique<Impl>()) {
  require(options.threads >= 0 && options.threads <= kMaxThreads, "Executor",
          "threads must be from 1 to ", kMaxThreads, ", or 0 for this machine's default; got ",
          options.threads, ".");
  require(options.spin_us >= -1, "Executor",
          "spin_us must be at least 0, or -1 for the default; got ", options.spin_us,
          ". Leave it out.");
  watch_forks();
  impl_->machine = machine;
  impl_->options = options;
  impl_->threads = options.threads > 0 ? options.threads : machine.default_threads();
  const std::lock_guard<std::mutex> lock(g_fork_mutex);
  impl_->forks = g_forks.load();
  impl_->pool.store(impl_->make_pool());
}

Executor::~Executor() {
  if (impl_->forks != g_forks.load()) return;
  Pool* pool = impl_->pool.load();
  pool->finish();
  delete pool;
}

int Executor::threads() const { return impl_->threads; }

int Executor::at_once() const { return impl_->at_once(); }

int64_t Executor::wakes() const { return impl_->pool.load()->wakes.load(); }

void Executor::run(int64_t count, std::span<const int64_t> lane_ends,
                   void (*call)(void*, int64_t, int), void* fn) {
  require(count >= 0 && count <= kMaxTasks, "Executor", "the number of tasks must be from 0 to ",
          kMaxTasks, "; got ", count, ". Make fewer, larger tasks.");
  require(int64_t(lane_ends.size()) <= at_once() &&
              std::is_sorted(lane_ends.begin(), lane_ends.end()) &&
              (lane_ends.empty() || lane_ends.front() >= 0),
          "Executor", "there must be at most ", at_once(),
          " lanes, and their ends must rise from 0; got ", lane_ends.size(),
          " lanes. Join some of them.");
  require(
      t_running == nullptr, "Executor",
      "a task must not call parallel() itself; got a nested call. Split the work into more tasks.");
  if (count == 0) return;
  Pool& pool = impl_->current();
  const std::lock_guard<std::mutex> turn(pool.turn);
  t_running = &pool;
  pool.failed.store(false, std::memory_order_relaxed);
  pool.run({call, fn, int32_t(count), int32_t(lane_ends.size())}, lane_ends);
  t_running = nullptr;
  if (pool.failed.load(std::memory_order_relaxed)) {
    std::rethrow_exception(std::exchange(pool.error, nullptr));
  }
}

}  // namespace cpumoe
