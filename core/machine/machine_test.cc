#include "machine/machine.h"

#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/error.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

namespace fs = std::filesystem;

// A directory that plays the root of another computer; removed at the end of the test.
class FakeRoot {
 public:
  FakeRoot() {
    std::string name = (fs::temp_directory_path() / "cpumoe_root_XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr);
    root_ = name;
  }
  ~FakeRoot() { fs::remove_all(root_); }
  void write(const std::string& path, const std::string& text) const {
    const fs::path file = root_ + path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  void allow(const std::string& cpus) const {
    write("/proc/self/status", "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t" + cpus);
  }
  void siblings(int cpu, const std::string& list) const {
    write("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list",
          list);
  }
  void cache(int cpu, int index, int level, const char* type, const char* size) const {
    const std::string dir = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index" +
                            std::to_string(index) + "/";
    write(dir + "level", std::to_string(level));
    write(dir + "type", type);
    write(dir + "size", size);
  }
  Machine probe() const { return probe_machine(root_, ""); }

 private:
  std::string root_;
};

// 2 sockets x 2 cores x 2 threads, one node a socket, Linux's usual numbering.
void two_sockets(const FakeRoot& root) {
  root.write("/sys/devices/system/cpu/online", "0-7");
  root.allow("0-127");  // the mask of a task may name CPUs that are not there
  for (int cpu = 0; cpu < 8; ++cpu) {
    root.siblings(cpu, std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
  }
  root.write("/sys/devices/system/node/online", "0-1");
  root.write("/sys/devices/system/node/node0/cpulist", "0-1,4-5");
  root.write("/sys/devices/system/node/node1/cpulist", "2-3,6-7");
}

TEST(two_sockets_with_smt) {
  const FakeRoot root;
  two_sockets(root);
  root.write("/proc/cpuinfo", "processor\t: 0\nmodel name\t: Fake CPU @ 2.0GHz\nflags\t\t: fpu");
  root.write("/proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:    8192 kB");
  root.cache(0, 0, 1, "Data", "48K");
  root.cache(0, 1, 1, "Instruction", "32K");
  root.cache(0, 2, 2, "Unified", "2048K");
  root.cache(0, 3, 3, "Unified", "60M");
  const Machine m = root.probe();
  CHECK_EQ(m.cpu_name, std::string("Fake CPU @ 2.0GHz"));
  CHECK_EQ(m.nodes, 2);
  CHECK_EQ(m.cores.size(), 4u);
  for (int i = 0; i < 4; ++i) {
    CHECK_EQ(m.cores[size_t(i)].node, i / 2);
    CHECK(m.cores[size_t(i)].cpus == (std::vector<int>{i, i + 4}));
  }
  CHECK_EQ(m.memory, 16384 << 10);
  CHECK_EQ(m.memory_available, 8192 << 10);
  CHECK_EQ(m.l1d, 48 << 10);
  CHECK_EQ(m.l2, 2 << 20);
  CHECK_EQ(m.l3, 60 << 20);
  CHECK_EQ(m.cgroup_cpus, 0.0);
  CHECK_EQ(m.cgroup_memory, 0);
  CHECK_EQ(m.default_threads(), 4);
}

TEST(cores_are_grouped_by_node_even_when_cpu_numbers_alternate) {
  const FakeRoot root;
  root.write("/sys/devices/system/cpu/online", "0-3");
  root.allow("0-3");
  root.write("/sys/devices/system/node/online", "0,2");
  root.write("/sys/devices/system/node/node0/cpulist", "0,2");
  root.write("/sys/devices/system/node/node2/cpulist", "1,3");
  const Machine m = root.probe();
  CHECK_EQ(m.nodes, 2);
  CHECK_EQ(m.cores.size(), 4u);
  CHECK(m.cores[0].cpus == std::vector<int>{0} && m.cores[1].cpus == std::vector<int>{2});
  CHECK(m.cores[2].cpus == std::vector<int>{1} && m.cores[3].cpus == std::vector<int>{3});
  CHECK_EQ(m.cores[3].node, 2);
}

TEST(affinity_mask_keeps_one_thread_of_a_core) {
  const FakeRoot root;
  two_sockets(root);
  root.allow("1,5-6");
  const Machine m = root.probe();
  CHECK_EQ(m.cores.size(), 2u);
  CHECK(m.cores[0].cpus == (std::vector<int>{1, 5}));
  CHECK(m.cores[1].cpus == std::vector<int>{6});
  CHECK_EQ(m.cores[1].node, 1);
  CHECK_EQ(m.default_threads(), 2);
}

TEST(two_dies_that_repeat_core_ids) {
  const FakeRoot root;
  root.write("/sys/devices/system/cpu/online", "0-3");
  root.allow("0-3");
  for (int cpu = 0; cpu < 4; ++cpu) {
    const std::string dir = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    root.write(dir + "core_id", std::to_string(cpu % 2));
    root.write(dir + "die_id", std::to_string(cpu / 2));
    root.write(dir + "physical_package_id", "0");
    root.write(dir + "core_cpus_list", std::to_string(cpu));
  }
  CHECK_EQ(root.probe().cores.size(), 4u);
}

TEST(cgroup_v2_takes_the_tightest_limit_on_the_way_up) {
  const FakeRoot root;
  two_sockets(root);
  root.write("/proc/self/cgroup", "0::/app/inner");
  root.write("/sys/fs/cgroup/app/inner/cpu.max", "max 100000");
  root.write("/sys/fs/cgroup/app/cpu.max", "150000 100000");
  root.write("/sys/fs/cgroup/app/inner/memory.max", "1073741824");
  root.write("/sys/fs/cgroup/app/memory.max", "max");
  const Machine m = root.probe();
  CHECK_EQ(m.cgroup_cpus, 1.5);
  CHECK_EQ(m.cgroup_memory, 1073741824);
  CHECK_EQ(m.default_threads(), 2);
}

TEST(cgroup_v1_inside_a_container) {
  const FakeRoot root;
  two_sockets(root);
  // The path names the host's tree, the container sees its own group at the mount point.
  root.write("/proc/self/cgroup", "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n0::/");
  root.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000");
  root.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000");
  root.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  Machine m = root.probe();
  CHECK_EQ(m.cgroup_cpus, 0.5);
  CHECK_EQ(m.cgroup_memory, 0);
  CHECK_EQ(m.default_threads(), 1);
  root.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1");
  root.write("/sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes", "4096000");
  m = root.probe();
  CHECK_EQ(m.cgroup_cpus, 0.0);
  CHECK_EQ(m.cgroup_memory, 4096000);
}

TEST(a_system_without_sys_and_proc) {
  const FakeRoot root;
  const Machine m = root.probe();
  CHECK_EQ(m.cores.size(), 1u);
  CHECK_EQ(m.nodes, 1);
  CHECK_EQ(m.default_threads(), 1);
  CHECK_EQ(m.memory, 0);
  CHECK_GT(m.l1d, 0);
}

TEST(damaged_files_are_passed_over) {
  const FakeRoot root;
  root.write("/sys/devices/system/cpu/online", "x,2-1,-4,0-1,99999999999999999999");
  root.allow("0-1");
  root.siblings(0, "0-");
  root.siblings(1, "");
  root.cache(0, 0, 1, "Data", "many");
  root.write("/proc/self/cgroup", "nonsense\n0::\n:::::");
  root.write("/sys/fs/cgroup/cpu.max", "0 0");
  root.write("/proc/meminfo", "MemTotal: lots");
  const Machine m = root.probe();
  CHECK_EQ(m.cores.size(), 2u);
  CHECK_EQ(m.cgroup_cpus, 0.0);
  CHECK_EQ(m.memory, 0);
}

TEST(this_computer) {
  const Machine m = probe_machine("", "");
  CHECK_GE(m.cores.size(), 1u);
  CHECK_LE(m.cores.size(), size_t(sysconf(_SC_NPROCESSORS_CONF)));
  CHECK_GT(m.memory, 0);
  CHECK(m.isa.has(Isa::scalar));
  CHECK(!m.cpu_name.empty());
}

TEST(forced_isa) {
  CHECK_EQ(probe_machine("", "scalar").isa.mask, 1u);
  CHECK_EQ(probe_machine("", "scalar").isa_reason, std::string("forced by CPUMOE_ISA=scalar"));
  CHECK_THROWS(probe_machine("", "sse9"), "must name an instruction set; got \"sse9\"");
  if (probe_isa().has(Isa::avx2)) {
    CHECK_EQ(probe_machine("", "avx2").isa.mask, 3u);
  } else {
    CHECK_THROWS(probe_machine("", "avx2"), "must have avx2");
  }
}

TEST(thread_count_from_the_environment) {
  Machine m;
  m.cores.resize(6);
  unsetenv("CPUMOE_THREADS");
  CHECK_EQ(probe_threads(m), 6);
  setenv("CPUMOE_THREADS", "12", 1);
  CHECK_EQ(probe_threads(m), 12);
  for (const char* bad : {"0", "-3", "two", "1025", "3x", "99999999999999999999"}) {
    setenv("CPUMOE_THREADS", bad, 1);
    CHECK_THROWS(probe_threads(m), concat("got \"", bad, "\""));
  }
  unsetenv("CPUMOE_THREADS");
}

}  // namespace
}  // namespace cpumoe
