// What this computer is, as a plain value that tests can fake. Nothing here is global.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "machine/isa.h"

namespace cpumoe {

struct Core {             // one physical core that we may use
  int node = 0;           // NUMA node
  std::vector<int> cpus;  // its logical CPUs within the affinity mask
};

struct Machine {
  std::string cpu_name;            // as the CPU calls itself
  IsaSet isa;                      // usable rows
  std::string isa_reason;          // why these (forced by CPUMOE_ISA, probed, ...)
  std::vector<Core> cores;         // within the affinity mask, grouped by node
  int nodes = 1;
  double cgroup_cpus = 0;          // CPU quota in CPUs; 0 = none
  int64_t cgroup_memory = 0;       // bytes; 0 = none
  int64_t memory = 0, memory_available = 0;  // bytes
  int64_t l1d = 32 << 10, l2 = 512 << 10, l3 = 8 << 20;  // bytes; l1d and l2 per core, l3 per group
  int64_t page = 4096;             // bytes

  // min(physical cores, ceil(quota)), at least 1. CPUMOE_THREADS overrides it in probe_threads().
  int default_threads() const;
};

inline constexpr int kMaxThreads = 1024;
// CPUMOE_THREADS when set, else machine.default_threads(). Throws Error on a bad CPUMOE_THREADS.
int probe_threads(const Machine& machine);

// Reads CPUID, /proc, /sys and the cgroup; honours CPUMOE_ISA. Throws Error on a bad CPUMOE_ISA.
Machine probe_machine();
// The same from another file-system root (tests): "<root>/sys/devices/system/cpu/...",
// "<root>/proc/...".
Machine probe_machine(const std::string& root, const std::string& forced_isa);

}  // namespace cpumoe
