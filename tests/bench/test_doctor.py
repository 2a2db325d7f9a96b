"""`cpumoe doctor`: fields, kernels with reasons, advice from faked facts."""

import json
from itertools import pairwise

import pytest

import cpumoe
from cpumoe import _core
from cpumoe.bench import diagnosis
from cpumoe.cli.main import main

MACHINE = {
    "cores": [(0, [0]), (0, [1]), (0, [2]), (0, [3])],
    "cgroup_cpus": 0.0,
    "cgroup_memory": 0,
    "memory": 64 << 30,
    "memory_available": 60 << 30,
    "threads": 4,
    "nodes": 1,
    "isa": ["scalar", "avx2"],
    "isa_reason": "probed",
}
QUIET = {"governor": "performance", "turbo": True, "huge_pages": "madvise", "load_average": 0.1}


def run(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *args])
    return stop.value.code or 0, capsys.readouterr().out


def test_json_has_everything(capsys):
    code, out = run(capsys, "--json", "-", "--no-measure")
    assert code == 0
    found = json.loads(out)
    assert list(found) == ["version", "machine", "system", "kernels", "limits", "advice"]
    assert found["limits"] is None
    assert found["machine"]["cpu_name"] == cpumoe.machine().cpu_name
    assert found["machine"]["threads"] >= 1
    assert set(found["system"]) >= {"governor", "turbo", "smt", "huge_pages", "load_average"}
    dot = found["kernels"]["dot"]
    table = {(k["code"], k["layout"]) for k in _core.kernels() if k["room"] == "dot"}
    assert {(r["code"], r["layout"]) for r in dot} == table
    assert {("bf16", "columns"), ("u4_gptq", "columns")} <= table
    assert all(row["kernel"] for row in dot), "every format and layout has a kernel on every CPU"
    of = {k["name"]: k["isa"] for k in _core.kernels()}
    isas = found["machine"]["isa"]
    floor = min(1, len(isas) - 1)  # scalar kernels only where there is nothing better
    assert all(isas.index(of[row["kernel"]]) >= floor for row in dot)


def test_the_ranges_of_tokens_have_no_gap():
    rows = diagnosis.chosen_kernels()["dot"]
    for key in {(r["format"], r["layout"]) for r in rows}:
        mine = [r for r in rows if (r["format"], r["layout"]) == key]
        assert mine[0]["tokens_min"] == 1
        assert mine[-1]["tokens_max"] is None
        for before, after in pairwise(mine):
            assert after["tokens_min"] == before["tokens_max"] + 1
            assert after["kernel"] != before["kernel"]


def test_a_chosen_kernel_is_not_among_the_refused_and_each_of_these_has_a_reason():
    rows = diagnosis.chosen_kernels()["dot"]
    for row in rows:
        assert row["kernel"] not in [r["kernel"] for r in row["refused"]]
        assert all(r["reason"] for r in row["refused"])
    assert any(row["refused"] for row in rows)


def test_the_page_for_people(capsys):
    code, out = run(capsys, "--no-measure")
    assert code == 0
    for title in ("Machine", "Limits", "Kernels", "To change"):
        assert f"\n{title}\n" in out
    assert "not measured" in out
    assert cpumoe.machine().cpu_name in out


def test_the_limits_are_measured(capsys):
    code, out = run(capsys, "--json", "-")
    assert code == 0
    limits = json.loads(out)["limits"]
    assert limits[0]["threads"] == 1
    for one in limits:
        assert one["read_gb_per_s"] > 0
        assert one["fma_gflop_per_s"] > 0
        assert one["disagreement"] >= 0


def test_nothing_to_say_about_a_good_machine():
    assert diagnosis.advice(MACHINE, QUIET, None) == []


@pytest.mark.parametrize(
    ("machine", "system", "words"),
    [
        ({"threads": 9}, {}, "9 threads are more than the 4 cores"),
        ({"threads": 2}, {}, "leave 2 cores idle"),
        ({"threads": 2, "cgroup_cpus": 2.0}, {}, "the cgroup allows 2 CPUs of 4 cores"),
        ({"isa": ["scalar"]}, {}, "only scalar kernels may be used (probed)"),
        ({"nodes": 2}, {}, "numactl"),
        ({}, {"governor": "powersave"}, "governor is powersave"),
        ({}, {"turbo": False}, "turbo is off"),
        ({}, {"huge_pages": "never"}, "transparent huge pages are off"),
        ({}, {"load_average": 3.2}, "load average is 3.2"),
        ({}, {"unused_features": ["avx512"]}, "the CPU has avx512"),
        ({"cgroup_memory": 8 << 30}, {}, "the cgroup allows 8.6 GB of 68.7 GB memory"),
        ({"memory_available": 1 << 30}, {}, "only 1.1 GB of memory are free"),
    ],
)
def test_one_finding_gives_one_sentence(machine, system, words):
    (sentence,) = diagnosis.advice(MACHINE | machine, QUIET | system, None)
    assert words in sentence


def test_jittering_limits_are_told():
    limits = [{"threads": 4, "disagreement": 0.3}, {"threads": 1, "disagreement": 0.05}]
    (sentence,) = diagnosis.advice(MACHINE, QUIET, limits)
    assert "with 4 threads differ by 30%" in sentence


def test_facts_come_from_the_files_of_the_system(tmp_path):
    files = {
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/cpu/intel_pstate/no_turbo": "1\n",
        "sys/devices/system/cpu/smt/active": "1\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/fs/cgroup/memory.current": "4096\n",
        "proc/cpuinfo": "processor : 0\nflags\t\t: fpu avx2 avx512f hypervisor\n",
        "proc/loadavg": "1.50 1.00 0.50 1/100 1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    facts = diagnosis.system_facts(tmp_path)
    assert facts | {"environment": {}} == {
        "governor": "powersave",
        "turbo": False,
        "smt": True,
        "huge_pages": "never",
        "virtual": True,
        "unused_features": ["avx512"],
        "load_average": 1.5,
        "memory_used": 4096,
        "environment": {},
    }


def test_a_system_that_does_not_say(tmp_path):
    facts = diagnosis.system_facts(tmp_path)
    assert facts["governor"] is None
    assert facts["turbo"] is None
    assert facts["huge_pages"] is None
    assert diagnosis.advice(MACHINE, facts, None) == []
