"""Opening by memory map: the published geometry of Qwen3-30B-A3B, 57 GB in a sparse file."""

import json
import subprocess
import sys

from hostile import header_of

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "max_position_embeddings": 40_960,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
PROGRAM = """
import sys, time
import cpumoe

def peak():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))

before = peak()
start = time.perf_counter()
model = cpumoe.load(sys.argv[1])
seconds = time.perf_counter() - start
print(model.nbytes, before, peak(), seconds)
"""


def tensors():
    h, inter = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
    yield "model.embed_tokens.weight", [CONFIG["vocab_size"], h]
    yield "lm_head.weight", [CONFIG["vocab_size"], h]
    yield "model.norm.weight", [h]
    for layer in range(CONFIG["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        yield f"{p}.input_layernorm.weight", [h]
        yield f"{p}.post_attention_layernorm.weight", [h]
        for name, rows in (("q", 4096), ("k", 512), ("v", 512)):
            yield f"{p}.self_attn.{name}_proj.weight", [rows, h]
        yield f"{p}.self_attn.o_proj.weight", [h, 4096]
        yield f"{p}.self_attn.q_norm.weight", [128]
        yield f"{p}.self_attn.k_norm.weight", [128]
        yield f"{p}.mlp.gate.weight", [128, h]
        for e in range(CONFIG["num_experts"]):
            yield f"{p}.mlp.experts.{e}.gate_proj.weight", [inter, h]
            yield f"{p}.mlp.experts.{e}.up_proj.weight", [inter, h]
            yield f"{p}.mlp.experts.{e}.down_proj.weight", [h, inter]


def test_opening_copies_no_weight(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    header = header_of({name: ("BF16", shape) for name, shape in tensors()})
    raw = json.dumps(header).encode()
    size = max(e["data_offsets"][1] for e in header.values())
    with (tmp_path / "model.safetensors").open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        f.truncate(8 + len(raw) + size)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    nbytes, before, peak, seconds = map(float, done.stdout.split())
    print(f"{nbytes / 1e9:.1f} GB opened in {seconds:.2f} s, {(peak - before) / 1e6:.0f} MB more")
    assert nbytes == size > 57e9
    assert peak < 300e6
