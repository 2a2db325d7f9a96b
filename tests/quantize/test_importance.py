"""Mean squares that calibration records, against Transformers' modules and numpy."""

import re

import numpy as np
import pytest
import torch
import transformers
from quantized_files import FAMILIES, model, tensors

import cpumoe
from cpumoe import Error, quantize
from cpumoe.quantize.importance import PRIOR

# Mean squares of fp32 activations: twice the logits' relative bound of tests/models.
BOUND = 2e-4
IDS = np.random.default_rng(4).integers(0, 101, 90).tolist()
WINDOW = 32


def silu(x):
    return x / (1 + np.exp(-x))


def inputs(path):
    """Module -> the rows it receives, float64, over all windows: Linear modules, MoE blocks."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    seen: dict[str, list] = {}
    for name, module in hf.named_modules():
        if isinstance(module, torch.nn.Linear) or name.endswith(".mlp"):
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.setdefault(name, []).append(
                    args[0].detach().reshape(-1, args[0].shape[-1]).double().numpy()
                )
            )
    with torch.no_grad():
        for at in range(0, len(IDS), WINDOW):
            hf(torch.tensor([IDS[at : at + WINDOW]]))
    return {name: np.concatenate(rows) for name, rows in seen.items()}


def close(got, rows):
    want = np.square(rows).mean(0)
    return np.abs(got - np.maximum(want, 1e-3 * want.mean())).max() <= BOUND * want.max()


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_modules_equal_transformers(family):
    path = model(family, dtype="float32")
    found, seen = quantize.calibrate(path, IDS, window=WINDOW), inputs(path)
    compared = [m for m in found if m in seen]
    assert len(compared) >= 8
    for module in compared:
        assert close(found[module], seen[module]), module
    want = {n.removesuffix(".weight") for n in tensors(path) if re.search("_proj.*weight$", n)}
    want |= {n.removesuffix(".weight") for n in tensors(path) if ".experts." in n}
    # Behind DeepSeek's low ranks: not seen, and not quantised.
    assert set(found) == {m for m in want if not m.endswith(("q_b_proj", "kv_b_proj"))}


def test_experts_equal_numpy():
    path = model("olmoe", dtype="float32")
    found, seen, w = quantize.calibrate(path, IDS, window=WINDOW), inputs(path), tensors(path)
    for layer in (0, 1):
        p = f"model.layers.{layer}.mlp"
        x = seen[p]
        logits = x @ w[f"{p}.gate.weight"].T.astype(np.float64)
        chosen = np.argsort(-logits, axis=1)[:, :2]
        own, down = {}, {}
        for e in range(4):
            own[e] = x[(chosen == e).any(1)]
            gate = own[e] @ w[f"{p}.experts.{e}.gate_proj.weight"].T.astype(np.float64)
            up = own[e] @ w[f"{p}.experts.{e}.up_proj.weight"].T.astype(np.float64)
            down[e] = silu(gate) * up
        for e in range(4):
            for name, rows, all_ in (
                ("gate_proj", own[e], x),
                ("up_proj", own[e], x),
                ("down_proj", down[e], np.concatenate(list(down.values()))),
            ):
                total = np.square(rows).sum(0) + PRIOR * np.square(all_).mean(0)
                want = total / (len(rows) + PRIOR)
                want = np.maximum(want, 1e-3 * want.mean())
                got = found[f"{p}.experts.{e}.{name}"]
                assert np.abs(got - want).max() <= BOUND * want.max()


def test_bundled_model_gets_a_smaller_weighted_error(bundled, tmp_path):
    text = (bundled / "heldout.txt").read_text(encoding="utf-8")[:12000]
    found = quantize.calibrate(bundled, text, window=256)
    plain = quantize.quantize_model(bundled, tmp_path / "a", format="int4_g32")
    made = quantize.quantize_model(bundled, tmp_path / "b", format="int4_g32", importance=found)
    assert made.classes["all"].weighted_error < made.classes["all"].error
    assert made.classes["all"].weighted_error < plain.classes["all"].error


def test_tap_sees_every_layer_in_order_and_may_end_the_call(bundled):
    loaded, sites = cpumoe.load(bundled), []
    session, ids = loaded.session(), np.arange(7, dtype=np.int32)
    plain = loaded.decoder.forward([(loaded.session().cache, ids)])
    tapped = loaded.decoder.forward(
        [(session.cache, ids)], tap=lambda *seen: sites.append((*seen[:2], seen[2].shape))
    )
    assert np.array_equal(plain, tapped)
    names = ("attention", "output", "feed_forward")
    assert sites == [(i, name, (7, 256)) for i in range(6) for name in names]

    def refuse(layer, site, x):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        loaded.decoder.forward([(session.cache, ids)], tap=refuse)
    assert session.cache.length == 7


def test_too_short_a_text_is_refused(bundled):
    with pytest.raises(Error, match="the text must hold a token to score"):
        quantize.calibrate(bundled, "a")
