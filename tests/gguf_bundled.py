"""The bundled model as a GGUF file in bf16, tokenizer and sampling included."""

import json
from pathlib import Path
from types import SimpleNamespace

import gguf
import transformers

from gguf_models import write_gguf
from tiny_models import Tiny

BF16 = gguf.GGMLQuantizationType.BF16


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """tokenizer.json of a byte-level BPE, as GGUF metadata."""
    described = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = sorted(described["model"]["vocab"], key=described["model"]["vocab"].__getitem__)
    named = {t["content"]: t["id"] for t in described["added_tokens"]}
    assert all(tokens[i] == name for name, i in named.items())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in named else 1 for t in tokens])
    merges = described["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(named[config["eos_token"]])
    writer.add_pad_token_id(named[config["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(config["chat_template"])
    writer.add_sampling_temp(0.7)
    writer.add_sampling_top_k(40)
    writer.add_sampling_top_p(0.95)


def bundled_case(folder: Path) -> Tiny:
    """The bundled model as write_gguf takes one."""
    config = transformers.AutoConfig.from_pretrained(folder)
    return Tiny(folder, SimpleNamespace(config=config))


def write_bundled(path: Path, folder: Path) -> Path:
    """Writes the model of `folder` to `path`."""
    write_gguf(
        path,
        bundled_case(folder),
        lambda value: (gguf.quantize(value, BF16), BF16),
        more=lambda writer: add_tokenizer(writer, folder),
    )
    return path
