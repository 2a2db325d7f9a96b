"""Killed, out of disk, two at a time: the same command ends with the same bytes. Bounded memory."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cpumoe import Error, quantize
from cpumoe.quantize.journal import JOURNAL

OPTIONS = {"format": "int4_g32", "shard_bytes": 1_200_000}


def contents(path):
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())}


def child(code, *args, **limits):
    """A process that runs `code` with sys.argv[1:] = args."""

    def limit():
        for name, value in limits.items():
            kind = getattr(resource, name)
            resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))

    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=limit,
    )


CONVERT = """
import json, sys, time
from cpumoe import quantize
source, out, options, pause = sys.argv[1:]
def progress(done, total):
    print(done / total, flush=True)
    time.sleep(float(pause))
quantize.quantize_model(source, out, **json.loads(options), progress=progress)
"""


@pytest.fixture(scope="module")
def whole(bundled, tmp_path_factory):
    """What an uninterrupted run writes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    quantize.quantize_model(bundled, out, **OPTIONS)
    return contents(out)


def test_killed_in_the_middle_and_run_again(bundled, tmp_path, whole):
    out = tmp_path / "out"
    seen = []
    for share in (0.2, 0.55, 0.9):  # of the source, each time from where the last one stopped
        process = child(CONVERT, bundled, out, json.dumps(OPTIONS), 0.002)
        for line in process.stdout:
            if float(line) > share:
                break
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        process.stderr.close()
        names = {p.name for p in out.iterdir()}
        assert JOURNAL in names
        assert not names & {"config.json", "model.safetensors.index.json"}
        seen.append(len([n for n in names if n.endswith(".safetensors")]))
    assert seen[0] < seen[1] < seen[2] < len([n for n in whole if n.endswith(".safetensors")])
    made = quantize.quantize_model(bundled, out, **OPTIONS)
    assert 0 < made.resumed < made.tasks
    assert contents(out) == whole


def test_report_of_a_continued_run_covers_all(bundled, tmp_path):
    class Stop(Exception):
        pass

    def progress(done, total):
        if done > 0.6 * total:
            raise Stop

    want = quantize.quantize_model(bundled, tmp_path / "a", **OPTIONS)
    with pytest.raises(Stop):
        quantize.quantize_model(bundled, tmp_path / "b", **OPTIONS, progress=progress)
    got = quantize.quantize_model(bundled, tmp_path / "b", **OPTIONS)
    assert got.resumed > 0
    assert got.classes == want.classes


@pytest.mark.parametrize("lost", ["shard", "part", "torn", "half name"])
def test_whatever_is_missing_is_made_again(lost, bundled, tmp_path, whole):
    class Stop(Exception):
        pass

    def progress(done, total):
        if done > 0.7 * total:
            raise Stop

    out = tmp_path / "out"
    with pytest.raises(Stop):
        quantize.quantize_model(bundled, out, **OPTIONS, progress=progress)
    shards = sorted(out.glob("*.safetensors"))
    (part,) = out.glob("*.part")
    assert len(shards) > 2
    if lost == "shard":
        shards[1].unlink()
    elif lost == "part":
        part.unlink()
    elif lost == "torn":  # a line that the kill cut off
        with (out / JOURNAL).open("ab") as journal:
            journal.write(b'{"done": 12')
    else:  # killed between the journal's line and the shard's new name
        part.unlink()
        lines = (out / JOURNAL).read_bytes().splitlines(keepends=True)
        ends = [line for line in lines if b"done" in line]
        shards[-1].rename(f"{shards[-1]}.part")
        (out / JOURNAL).write_bytes(lines[0] + ends[len(shards) - 1])
    quantize.quantize_model(bundled, out, **OPTIONS)
    assert contents(out) == whole


def test_other_settings_do_not_continue(bundled, tmp_path):
    class Stop(Exception):
        pass

    def progress(done, total):
        if done > 0.4 * total:
            raise Stop

    with pytest.raises(Stop):
        quantize.quantize_model(bundled, tmp_path / "out", **OPTIONS, progress=progress)
    before = contents(tmp_path / "out")
    for change in ({"format": "int4_g64"}, {"scales": "absmax"}, {"attention": False}):
        with pytest.raises(Error, match="it holds that of other settings or of another source"):
            quantize.quantize_model(bundled, tmp_path / "out", **{**OPTIONS, **change})
    assert contents(tmp_path / "out") == before


def test_two_at_a_time_are_refused(bundled, tmp_path):
    out = tmp_path / "out"
    process = child(CONVERT, bundled, out, json.dumps(OPTIONS), 0.05)
    try:
        process.stdout.readline()
        with pytest.raises(Error, match="must be written by one process at a time"):
            quantize.quantize_model(bundled, out, **OPTIONS)
    finally:
        process.kill()
        process.communicate()


def test_full_disk_is_a_sentence_and_leaves_what_can_be_continued(bundled, tmp_path, whole):
    """A limit on file sizes stands for the disk: a later shard is larger than the first ones."""
    out = tmp_path / "out"
    process = child(CONVERT, bundled, out, json.dumps(OPTIONS), 0, RLIMIT_FSIZE=1_300_000)
    _, errors = process.communicate()
    assert process.returncode == 1
    last = errors.decode().splitlines()[-1]
    assert last.startswith("cpumoe._core.Error: ")
    assert "the disk must have room for the model" in last
    assert "run the same command again: it continues where it stopped" in last
    assert not (out / "config.json").exists()
    made = quantize.quantize_model(bundled, out, **OPTIONS)
    assert contents(out) == whole
    assert made.tasks > 0


def test_too_small_a_disk_is_refused_at_once(bundled, tmp_path, monkeypatch):
    real = os.statvfs

    def small(path):
        info = list(real(path))
        info[4] = 1000  # blocks free to users
        return os.statvfs_result(info)

    monkeypatch.setattr(os, "statvfs", small)
    with pytest.raises(Error, match=r"must have room for 0\.0\d GB more; 0\.00 GB are free"):
        quantize.quantize_model(bundled, tmp_path / "out", **OPTIONS)
    assert [p.name for p in (tmp_path / "out").iterdir()] == [JOURNAL]
    monkeypatch.undo()
    quantize.quantize_model(bundled, tmp_path / "out", **OPTIONS)


def sparse_model(path: Path, layers: int, width: int) -> int:
    """A dense model of zeros in a file with holes; returns its bytes."""
    path.mkdir()
    shapes = {"model.embed_tokens.weight": [64, width], "model.norm.weight": [width]}
    for i in range(layers):
        p = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{p}.{name}.weight"] = [width]
        for name in ("q", "k", "v", "o"):
            shapes[f"{p}.self_attn.{name}_proj.weight"] = [width, width]
        for name in ("gate", "up", "down"):
            shapes[f"{p}.mlp.{name}_proj.weight"] = [width, width]
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    return at


PEAK = """
import resource, sys
from cpumoe import quantize
import cpumoe.engine.gguf_tokenizer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantize.quantize_model(sys.argv[1], sys.argv[2], format="int4_g64", scales="absmax", threads=2)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_is_bounded(tmp_path):
    """The peak stays the same, and far below the model, when the model doubles."""
    peaks, sizes = [], []
    for layers in (4, 8):
        sizes.append(sparse_model(tmp_path / str(layers), layers, 2048))
        process = child(PEAK, tmp_path / str(layers), tmp_path / f"{layers}-out")
        out, errors = process.communicate()
        assert process.returncode == 0, errors.decode()
        peaks.append(int(out))
    assert sizes[1] > 450e6
    # 64 MiB of the source's pages; with 2 threads 4 tasks of 2^20 elements under way or waiting,
    # each at most 4 (rows) + 4 x 4 (block, two temporaries, slack) + 1 + 0.5 bytes an element.
    bound = (64 << 20) + 4 * (1 << 20) * 22 + (32 << 20)
    assert peaks[0] < bound
    assert peaks[1] < bound
