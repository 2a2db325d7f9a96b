// What this computer is, and the threads that work on it.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/error.h"
#include "bindings.h"
#include "kernels/probe/measure.h"
#include "machine/executor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cpumoe_py {
namespace {

using cpumoe::Executor;
using cpumoe::Isa;
using cpumoe::IsaSet;
using cpumoe::Machine;
using cpumoe::Probe;

std::vector<std::string> isa_names(IsaSet set) {
  std::vector<std::string> names;
  for (int i = 0; i < cpumoe::kIsaCount; ++i) {
    if (set.has(Isa(i))) names.emplace_back(cpumoe::isa_name(Isa(i)));
  }
  return names;
}

std::vector<std::pair<int, std::vector<int>>> cores(const Machine& machine) {
  std::vector<std::pair<int, std::vector<int>>> result;
  for (const cpumoe::Core& core : machine.cores) result.emplace_back(core.node, core.cpus);
  return result;
}

nb::dict as_dict(const Machine& m) {
  nb::dict d;
  d["cpu_name"] = m.cpu_name;
  d["isa"] = isa_names(m.isa);
  d["isa_reason"] = m.isa_reason;
  d["cores"] = cores(m);
  d["nodes"] = m.nodes;
  d["cgroup_cpus"] = m.cgroup_cpus;
  d["cgroup_memory"] = m.cgroup_memory;
  d["memory"] = m.memory;
  d["memory_available"] = m.memory_available;
  d["l1d"] = m.l1d;
  d["l2"] = m.l2;
  d["l3"] = m.l3;
  d["page"] = m.page;
  d["default_threads"] = m.default_threads();
  return d;
}

}  // namespace

void bind_machine(nb::module_& m) {
  nb::exception<cpumoe::Error>(m, "Error", PyExc_ValueError).attr("__doc__") =
      "An input that cpumoe refuses: `<where>: <what must hold>; got <values>. <what to do>`.";

  nb::class_<Machine>(m, "Machine", "What this computer is. Read-only.")
      .def_static("probe", [] { return cpumoe::probe_machine(); },
                  "Reads CPUID, /proc, /sys and the cgroup; honours CPUMOE_ISA.")
      .def_static("probe_root",
                  [](const std::string& root, const std::string& isa) {
                    return cpumoe::probe_machine(root, isa);
                  },
                  "root"_a, "isa"_a = "", "The same from another file-system root.")
      .def_prop_ro("cpu_name", [](const Machine& x) { return x.cpu_name; })
      .def_prop_ro("isa", [](const Machine& x) { return isa_names(x.isa); })
      .def_prop_ro("isa_reason", [](const Machine& x) { return x.isa_reason; })
      .def_prop_ro("cores", &cores,
                   "[(NUMA node, [logical CPU, ...]), ...], one per physical core.")
      .def_prop_ro("nodes", [](const Machine& x) { return x.nodes; })
      .def_prop_ro("cgroup_cpus", [](const Machine& x) { return x.cgroup_cpus; })
      .def_prop_ro("cgroup_memory", [](const Machine& x) { return x.cgroup_memory; })
      .def_prop_ro("memory", [](const Machine& x) { return x.memory; })
      .def_prop_ro("memory_available", [](const Machine& x) { return x.memory_available; })
      .def_prop_ro("l1d", [](const Machine& x) { return x.l1d; })
      .def_prop_ro("l2", [](const Machine& x) { return x.l2; })
      .def_prop_ro("l3", [](const Machine& x) { return x.l3; })
      .def_prop_ro("page", [](const Machine& x) { return x.page; })
      .def_prop_ro("default_threads", &Machine::default_threads)
      .def("as_dict", &as_dict, nb::sig("def as_dict(self) -> dict[str, object]"),
           "Every attribute by name; sizes in bytes.")
      .def("__repr__", [](const Machine& x) {
        return cpumoe::concat("Machine(", x.cpu_name, ", ", x.cores.size(), " cores, ", x.nodes,
                              " nodes, ", isa_names(x.isa).back(), ")");
      });

  nb::class_<Executor>(m, "Executor",
                       "Worker threads that run the operators. Idle workers sleep.")
      .def("__init__",
           [](Executor* self, std::optional<int> threads, bool pin, int spin_us) {
             const Machine machine = cpumoe::probe_machine();
             if (threads) {
               cpumoe::require(*threads >= 1, "Executor", "threads must be at least 1; got ",
                               *threads, ". Leave it out for this machine's default.");
             }
             Executor::Options options;
             options.threads = threads ? *threads : cpumoe::probe_threads(machine);
             options.pin = pin;
             options.spin_us = spin_us;
             new (self) Executor(machine, options);
           },
           "threads"_a = nb::none(), "pin"_a = true, "spin_us"_a = -1,
           "threads: 1..1024; default CPUMOE_THREADS, else physical cores within affinity mask and\n"
           "cgroup quota. pin: bind workers to NUMA nodes. spin_us: microseconds that an idle worker spins\n"
           "before it sleeps, -1 for the default. Raises Error.")
      .def_prop_ro("threads", &Executor::threads)
      .def_prop_ro("wakes", &Executor::wakes, "Times that a sleeping worker was woken so far.")
      .def("__repr__", [](const Executor& x) {
        return cpumoe::concat("Executor(threads=", x.threads(), ")");
      });

  nb::class_<Probe>(m, "Probe", "Short measurements of this machine's limits.")
      .def("__init__",
           [](Probe* self, int64_t bytes) { new (self) Probe(cpumoe::probe_machine(), bytes); },
           "bytes"_a = 0,
           "bytes: size of the buffer that is read; 0: 1 GiB, or a quarter of the available memory\n"
           "where that is less. The first measurement allocates it. Raises Error below 1 MiB.")
      .def_prop_ro("bytes", &Probe::bytes)
      .def("read_gb_per_s", &Probe::read_gb_per_s, "executor"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Read bandwidth in GB/s with the executor's threads: one pass, tens of milliseconds.")
      .def("fma_gflop_per_s", &Probe::fma_gflop_per_s, "executor"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Peak of fp32 multiplies and adds in GFLOP/s with the executor's threads, over 20 ms.");
}

}  // namespace cpumoe_py
