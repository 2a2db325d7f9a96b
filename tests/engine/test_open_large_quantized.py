"""Opening a quantised checkpoint: Qwen3-30B-A3B in MXFP4, 37 thousand tensors, sparse file."""

import json
import subprocess
import sys

from test_open_large import CONFIG, PROGRAM, tensors

from hostile import header_of

WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def quantised():
    """(name, dtype, shape) of every tensor; routers, norms, embeddings and the head are floats."""
    for name, shape in tensors():
        if len(shape) < 2 or name.endswith(("gate.weight", "tokens.weight", "head.weight")):
            yield name, "BF16", shape
            continue
        n, k = shape
        yield f"{name}_packed", "U8", [n, k // 2]
        yield f"{name}_scale", "U8", [n, k // 32]


def test_opening_reads_a_bounded_part_of_the_scales(tmp_path):
    header = header_of({name: (dtype, shape) for name, dtype, shape in quantised()})
    raw = json.dumps(header).encode()
    size = max(e["data_offsets"][1] for e in header.values())
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": QUANTIZATION})
    )
    with (tmp_path / "model.safetensors").open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        f.truncate(8 + len(raw) + size)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    nbytes, before, peak, seconds = map(float, done.stdout.split())
    print(f"{nbytes / 1e9:.1f} GB opened in {seconds:.2f} s, {(peak - before) / 1e6:.0f} MB more")
    assert nbytes == size > 16e9
    assert peak < 400e6  # of 940 MB of scales 32 MB are read; the rest is names, headers and views
