#include "machine/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include "base/error.h"

namespace cpumoe {
namespace {

constexpr int kMaxCpu = 1 << 16;              // no Linux build has more; bounds a damaged list
constexpr int64_t kNoLimit = int64_t{1} << 60;  // cgroup v1 writes about 2^63 for "no limit"

// Whole file without trailing white space; empty when it cannot be read.
std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  return text;
}

bool parse_int(const std::string& text, int64_t* value) {
  if (text.empty()) return false;
  char* end = nullptr;
  errno = 0;
  *value = std::strtoll(text.c_str(), &end, 10);
  return errno == 0 && end != text.c_str();
}

// "0-3,8" -> {0, 1, 2, 3, 8}. Parts that are no numbers are passed over.
std::set<int> parse_cpu_list(const std::string& text) {
  std::set<int> cpus;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    int64_t first = 0, last = 0;
    if (!parse_int(part, &first)) continue;
    const size_t dash = part.find('-', 1);
    if (dash == std::string::npos || !parse_int(part.substr(dash + 1), &last)) last = first;
    for (int64_t c = std::max<int64_t>(first, 0); c <= std::min<int64_t>(last, kMaxCpu); ++c) {
      cpus.insert(int(c));
    }
  }
  return cpus;
}

// The text behind "key<blanks>:" in a file of such lines (/proc/cpuinfo, status, meminfo).
std::string field(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || line.compare(0, key.size(), key) != 0) continue;
    if (line.find_first_not_of(" \t", key.size()) != colon) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

// CPUs that this thread may run on and that are online. The mask in /proc may name absent CPUs.
std::set<int> allowed_cpus(const std::string& root) {
  if (root.empty()) {
    for (int size = 1024; size <= kMaxCpu; size *= 2) {
      cpu_set_t* mask = CPU_ALLOC(size_t(size));
      const size_t bytes = CPU_ALLOC_SIZE(size_t(size));
      std::set<int> cpus;
      if (mask != nullptr && sched_getaffinity(0, bytes, mask) == 0) {
        for (int c = 0; c < size; ++c) {
          if (CPU_ISSET_S(size_t(c), bytes, mask)) cpus.insert(c);
        }
      }
      CPU_FREE(mask);
      if (!cpus.empty()) return cpus;
    }
    return {0};
  }
  const std::set<int> allowed =
      parse_cpu_list(field(read_text(root + "/proc/self/status"), "Cpus_allowed_list"));
  const std::set<int> online = parse_cpu_list(read_text(root + "/sys/devices/system/cpu/online"));
  std::set<int> both;
  std::set_intersection(allowed.begin(), allowed.end(), online.begin(), online.end(),
                        std::inserter(both, both.end()));
  if (both.empty()) both = allowed.empty() ? online : allowed;
  return both.empty() ? std::set<int>{0} : both;
}

std::map<int, int> node_of_cpu(const std::string& root, const std::set<int>& cpus, int* nodes) {
  const std::string base = root + "/sys/devices/system/node";
  std::map<int, int> result;
  *nodes = 0;
  for (int node : parse_cpu_list(read_text(base + "/online"))) {
    ++*nodes;
    for (int c : parse_cpu_list(read_text(base + "/node" + std::to_string(node) + "/cpulist"))) {
      if (cpus.count(c) != 0) result[c] = node;
    }
  }
  *nodes = std::max(*nodes, 1);
  return result;
}

// One Core per set of hardware threads. The sibling list is the key because core_id repeats between
// the dies and packages of one machine.
std::vector<Core> read_cores(const std::string& root, const std::set<int>& cpus,
                             const std::map<int, int>& nodes) {
  std::vector<Core> cores;
  std::set<int> taken;
  for (int cpu : cpus) {
    if (taken.count(cpu) != 0) continue;
    const std::string topology =
        root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    std::set<int> siblings = parse_cpu_list(read_text(topology + "core_cpus_list"));
    if (siblings.empty()) siblings = parse_cpu_list(read_text(topology + "thread_siblings_list"));
    siblings.insert(cpu);
    const auto node = nodes.find(cpu);
    Core core{node == nodes.end() ? 0 : node->second, {}};
    for (int s : siblings) {
      if (cpus.count(s) != 0 && taken.insert(s).second) core.cpus.push_back(s);
    }
    cores.push_back(core);
  }
  std::stable_sort(cores.begin(), cores.end(),
                   [](const Core& a, const Core& b) { return a.node < b.node; });
  return cores;
}

int64_t parse_cache_size(const std::string& text) {
  int64_t value = 0;
  if (!parse_int(text, &value) || value <= 0) return 0;
  const char unit = text.back();
  return unit == 'K' ? value << 10 : unit == 'M' ? value << 20 : value;
}

void read_caches(const std::string& root, int cpu, Machine& machine) {
  const std::string base =
      root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index";
  int64_t found[4] = {};
  for (int i = 0; i < 8; ++i) {
    const std::string dir = base + std::to_string(i) + "/";
    int64_t level = 0;
    if (!parse_int(read_text(dir + "level"), &level) || level < 1 || level > 3) continue;
    if (read_text(dir + "type") == "Instruction") continue;
    found[level] = parse_cache_size(read_text(dir + "size"));
  }
  if (root.empty()) {
    const int names[4] = {0, _SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE};
    for (int level = 1; level <= 3; ++level) {
      if (found[level] == 0) found[level] = std::max<int64_t>(sysconf(names[level]), 0);
    }
  }
  if (found[1] > 0) machine.l1d = found[1];
  if (found[2] > 0) machine.l2 = found[2];
  if (found[3] > 0) machine.l3 = found[3];
}

// Every directory from <mount><path> up to <mount>: limits add up along the way, and a container
// often sees its own group mounted as the top.
std::vector<std::string> group_dirs(const std::string& mount, std::string path) {
  std::vector<std::string> dirs;
  while (path.size() > 1 && path[0] == '/') {
    dirs.push_back(mount + path + "/");
    path.erase(path.find_last_of('/'));
  }
  dirs.push_back(mount + "/");
  return dirs;
}

void limit_cpus(Machine& machine, int64_t quota, int64_t period) {
  if (quota <= 0 || period <= 0) return;
  const double cpus = double(quota) / double(period);
  if (machine.cgroup_cpus == 0 || cpus < machine.cgroup_cpus) machine.cgroup_cpus = cpus;
}

void limit_memory(Machine& machine, int64_t bytes) {
  if (bytes <= 0 || bytes >= kNoLimit) return;
  if (machine.cgroup_memory == 0 || bytes < machine.cgroup_memory) machine.cgroup_memory = bytes;
}

void read_group_v2(const std::string& dir, Machine& machine) {
  int64_t quota = 0, period = 0, bytes = 0;
  std::istringstream cpu_max(read_text(dir + "cpu.max"));  // "150000 100000" or "max 100000"
  if (cpu_max >> quota >> period) limit_cpus(machine, quota, period);
  if (parse_int(read_text(dir + "memory.max"), &bytes)) limit_memory(machine, bytes);
}

void read_group_v1(const std::string& dir, Machine& machine) {
  int64_t quota = 0, period = 0, bytes = 0;
  if (parse_int(read_text(dir + "cpu.cfs_quota_us"), &quota) &&
      parse_int(read_text(dir + "cpu.cfs_period_us"), &period)) {
    limit_cpus(machine, quota, period);
  }
  if (parse_int(read_text(dir + "memory.limit_in_bytes"), &bytes)) limit_memory(machine, bytes);
}

// Lines of /proc/self/cgroup: "0::/path" (v2) or "4:cpu,cpuacct:/path" (v1).
void read_cgroup(const std::string& root, Machine& machine) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::istringstream lines(read_text(root + "/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      for (const std::string& dir : group_dirs(mount, path)) read_group_v2(dir, machine);
      continue;
    }
    for (const std::string& dir : group_dirs(mount + "/" + controllers, path)) {
      read_group_v1(dir, machine);
    }
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
      if (name != "cpu" && name != "memory") continue;
      for (const std::string& dir : group_dirs(mount + "/" + name, path)) {
        read_group_v1(dir, machine);
      }
    }
  }
}

int64_t meminfo_bytes(const std::string& text, const char* key) {
  int64_t kib = 0;
  return parse_int(field(text, key), &kib) ? kib << 10 : 0;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

int Machine::default_threads() const {
  int threads = std::max<int>(1, int(cores.size()));
  if (cgroup_cpus > 0) threads = std::min(threads, std::max(1, int(std::ceil(cgroup_cpus))));
  return threads;
}

int probe_threads(const Machine& machine) {
  const std::string text = environment("CPUMOE_THREADS");
  if (text.empty()) return machine.default_threads();
  int64_t threads = 0;
  const bool number = text.find_first_not_of("0123456789") == std::string::npos;
  require(number && parse_int(text, &threads) && threads >= 1 && threads <= kMaxThreads,
          "CPUMOE_THREADS", "must be a number from 1 to ", kMaxThreads, "; got \"", text,
          "\". Unset it to use ", machine.default_threads(), " threads.");
  return int(threads);
}

Machine probe_machine(const std::string& root, const std::string& forced_isa) {
  Machine machine;
  machine.isa = usable_isa(forced_isa);
  machine.isa_reason = forced_isa.empty() ? "the best this CPU and this build have"
                                          : "forced by CPUMOE_ISA=" + forced_isa;
  machine.cpu_name = field(read_text(root + "/proc/cpuinfo"), "model name");
  if (machine.cpu_name.empty()) machine.cpu_name = "unknown CPU";
  const std::set<int> cpus = allowed_cpus(root);
  machine.cores = read_cores(root, cpus, node_of_cpu(root, cpus, &machine.nodes));
  read_caches(root, *cpus.begin(), machine);
  read_cgroup(root, machine);
  const std::string meminfo = read_text(root + "/proc/meminfo");
  machine.memory = meminfo_bytes(meminfo, "MemTotal");
  machine.memory_available = meminfo_bytes(meminfo, "MemAvailable");
  machine.page = sysconf(_SC_PAGESIZE);
  return machine;
}

Machine probe_machine() { return probe_machine("", environment("CPUMOE_ISA")); }

}  // namespace cpumoe
