"""Multi-head latent attention (DeepSeek): config and tensors -> AttentionSpec in absorbed form."""

from __future__ import annotations

from cpumoe.checkpoint import TensorRef
from cpumoe.models.config import MAX_WIDTH
from cpumoe.models.reader import FLOAT_FORMATS, MATRIX_FORMATS, Reader
from cpumoe.models.rope import rope, score_factor
from cpumoe.models.spec import AttentionSpec, LatentSpec, Linear
from cpumoe.weight import Weight


def latent_attention(r: Reader, layer: int, *, interleaved: bool) -> AttentionSpec:
    """Layer `layer`'s attention under DeepSeek's names."""
    c, p = r.config, f"model.layers.{layer}.self_attn"
    if r.kv_heads != r.heads:
        raise c.fail("num_key_value_heads", f"num_attention_heads {r.heads}: all share one latent")
    rank, value = c.integer("kv_lora_rank", 1, MAX_WIDTH), c.integer("v_head_dim", 1, MAX_WIDTH)
    nope = c.integer("qk_nope_head_dim", 1, MAX_WIDTH)
    rotated = c.integer("qk_rope_head_dim", 2, MAX_WIDTH)
    if rotated % 2:
        raise c.fail("qk_rope_head_dim", "even")
    head_dim, bias = nope + rotated, c.flag("attention_bias", default=False)
    inv_freq, rope_scale = rope(c, rotated, 1e4)
    q, q_a, q_norm = _query(r, p, r.heads * head_dim, bias)
    k_up, v_up = _up(r, p, rank, nope, value)
    return AttentionSpec(
        heads=r.heads,
        kv_heads=1,
        head_dim=head_dim,
        q=q,
        k=r.linear(f"{p}.kv_a_proj_with_mqa", rank + rotated, r.hidden, bias),
        v=None,
        o=r.linear(f"{p}.o_proj", r.hidden, r.heads * value, bias),
        scale=head_dim**-0.5 * score_factor(c),
        inv_freq=inv_freq,
        rope_scale=rope_scale,
        rope_interleaved=interleaved,
        latent=LatentSpec(
            rank=rank,
            value_dim=value,
            norm=r.vector(f"{p}.kv_a_layernorm.weight", rank),
            k_up=k_up,
            v_up=v_up,
            q_a=q_a,
            q_norm=q_norm,
        ),
    )


def _query(
    r: Reader, p: str, width: int, bias: bool
) -> tuple[Linear, Linear | None, TensorRef | None]:
    """(q, q_a, its norm): the query's projection, from the hidden state or from a low rank."""
    if not r.config.has("q_lora_rank"):
        return r.linear(f"{p}.q_proj", width, r.hidden), None, None
    rank = r.config.integer("q_lora_rank", 1, MAX_WIDTH)
    return (
        r.linear(f"{p}.q_b_proj", width, rank),
        r.linear(f"{p}.q_a_proj", rank, r.hidden, bias),
        r.vector(f"{p}.q_a_layernorm.weight", rank),
    )


_Views = tuple[TensorRef | Weight, ...]


def _up(r: Reader, p: str, rank: int, nope: int, value: int) -> tuple[_Views, _Views]:
    """(k_up, v_up) of each head.

    kv_b_proj [heads * (nope + value), rank]: a head's first `nope` rows, read as columns, are its
    k_up [rank, nope]; the others are its v_up. GGUF has both apart, per head. In place but for k_up
    in quantised formats whose scales cover inputs only, which becomes fp32.
    """
    heads = range(r.heads)
    if f"{p}.k_b_proj.weight" in r.checkpoint:
        k = r.checkpoint.tensor(f"{p}.k_b_proj.weight", (r.heads, rank, nope), MATRIX_FORMATS)
        v = r.checkpoint.tensor(f"{p}.v_b_proj.weight", (r.heads, value, rank), MATRIX_FORMATS)
        return tuple(k.part(i) for i in heads), tuple(v.part(i) for i in heads)
    shape = (r.heads * (nope + value), rank)
    quantised = r.weights.matrix(f"{p}.kv_b_proj", *shape)
    if quantised is not None:
        starts = [i * (nope + value) for i in heads]
        all_rows = quantised.weight()
        return (
            tuple(r.weights.turned(quantised, first, nope) for first in starts),
            tuple(all_rows.features(first + nope, value) for first in starts),
        )
    both = r.checkpoint.tensor(f"{p}.kv_b_proj.weight", shape, MATRIX_FORMATS)
    k_up, v_up = [], []
    for i in heads:
        first = i * (nope + value)
        rows = both.part(slice(first, first + nope))
        k_up.append(_as_columns(rows))
        v_up.append(both.part(slice(first + nope, first + nope + value)))
    return tuple(k_up), tuple(v_up)


def _as_columns(rows: TensorRef) -> Weight:
    """Rows [nope, rank] as [rank, nope]: in place, but GGUF's blocks, which run along rows."""
    shape, values, form = rows.shape[::-1], rows.data, rows.format
    if form not in FLOAT_FORMATS:
        decoded = Weight(values, format=form, shape=rows.shape).decode()
        return Weight(decoded, format="fp32", shape=shape, layout="columns")
    return Weight(values, format=form, shape=shape, layout="columns")
