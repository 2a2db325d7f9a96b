"""Perplexity, KL divergence and agreement against float64, window by window."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
import transformers

import cpumoe
from cpumoe.engine import evaluate as module
from cpumoe.engine.evaluate import Evaluation, Evaluator, cut_windows, evaluate
from tiny_models import prompt, tiny

# Of the largest logit; the bound that tests/models holds the logits to.
LOGIT_BOUND = 1e-4


def log_probabilities(logits):
    return torch.log_softmax(torch.as_tensor(np.asarray(logits, np.float64)), -1).numpy()


def losses(logits, ids):
    """float64 loss of ids[1:], given the logits behind each token."""
    return -log_probabilities(logits)[np.arange(len(ids) - 1), ids[1:]]


@pytest.fixture(scope="module")
def text(bundled):
    return (bundled / "heldout.txt").read_text(encoding="utf-8")[:4000]


def test_perplexity_is_that_of_transformers_in_float64(bundled, text):
    model = cpumoe.load(bundled, kv="fp32", activations="fp32")
    found = evaluate(model, text, window=128).figures()
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        bundled, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled)
    ids = tokenizer(text)["input_ids"]
    total, count, off = 0.0, 0, 0.0
    for at in range(0, len(ids), 128):
        part = ids[at : at + 128]
        with torch.no_grad():
            want = hf(torch.tensor([part])).logits[0].numpy()
        off = max(off, np.abs(model.logits(part) - want).max() / np.abs(want).max())
        largest = np.abs(want).max()
        total += losses(want, part).sum()
        count += len(part) - 1
    assert found["tokens"] == count
    assert off < LOGIT_BOUND
    # logsumexp and one logit each move by no more than the largest error of a logit.
    assert abs(found["loss"] - total / count) <= 2 * LOGIT_BOUND * largest
    assert abs(found["loss"] - total / count) < 1e-5
    assert found["perplexity"] == np.exp(found["loss"])


def test_the_figure_measured_when_the_bundled_model_was_trained(bundled):
    """eval.json: Transformers in fp32, windows of 512; four decimals were kept."""
    heldout = (bundled / "heldout.txt").read_text(encoding="utf-8")
    known = json.loads((bundled / "eval.json").read_text())["texts"]["heldout.txt"]
    found = evaluate(cpumoe.load(bundled, kv="fp32"), heldout).figures()
    assert found["tokens"] == known["fp32_context_512"]["scored_tokens"]
    # The published weights are bf16; the fp32 ones differ in the fourth decimal there too.
    assert found["perplexity"] == pytest.approx(known["fp32_context_512"]["ppl"], rel=2e-4)


@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(("window", "stride"), [(16, None), (16, 5), (16, 15), (2, None), (64, 1)])
def test_each_window_by_hand(variant, window, stride):
    case = tiny(variant)
    model, ids = cpumoe.load(case.path, kv="fp32"), prompt(61, seed=4)
    evaluator = Evaluator(model, ids, window=window, stride=stride)
    for _ in evaluator.run():
        pass
    scored = []
    for w, (count, loss, *_) in zip(evaluator.windows, evaluator.result.sums, strict=True):
        part = ids[w.begin : w.end]
        want = losses(case.logits(part), part)[w.first - w.begin - 1 :]
        assert count == len(want) == w.end - w.first
        assert loss == pytest.approx(want.sum(), rel=1e-4)
        scored += range(w.first, w.end)
    assert len(set(scored)) == len(scored)
    if stride is not None and stride < window:
        assert scored == list(range(1, 61))
        assert all(w.first - w.begin >= window - stride for w in evaluator.windows[1:])
    else:
        assert scored == [i for i in range(61) if i % window]
    assert evaluator.result.complete


def test_comparison_by_hand():
    """KL, agreement and both losses from the two models' own logits."""
    one, two = (cpumoe.load(tiny(v).path, kv="fp32") for v in ("qwen3_moe", "olmoe"))
    ids = prompt(50, seed=5)
    found = evaluate(one, ids, other=two, window=25).figures()
    kl, same, loss = [], [], []
    for at in (0, 25):
        part = ids[at : at + 25]
        a, b = (log_probabilities(m.logits(part))[:-1] for m in (one, two))
        kl += (np.exp(a) * (a - b)).sum(1).tolist()
        same += (a.argmax(1) == b.argmax(1)).tolist()
        loss += (losses(two.logits(part), part) - losses(one.logits(part), part)).tolist()
    assert found["kl"] == pytest.approx(np.mean(kl), rel=1e-6)
    assert found["kl"] > 0.01
    assert found["agreement"] == np.mean(same) < 1
    assert found["change"] == pytest.approx(np.expm1(np.mean(loss)), rel=1e-6)
    assert found["change"] == pytest.approx(
        found["other_perplexity"] / found["perplexity"] - 1, rel=1e-9
    )


def test_a_model_and_itself(bundled, text):
    one, two = cpumoe.load(bundled), cpumoe.load(bundled)
    found = evaluate(one, text, other=two, window=100, stride=50).figures()
    assert found["kl"] == found["kl_se"] == found["change"] == found["change_se"] == 0
    assert found["agreement"] == 1
    assert found["agreement_se"] == 0
    assert found["other_perplexity"] == found["perplexity"]


def test_another_setting_differs_a_little(bundled, text):
    exact = cpumoe.load(bundled, kv="fp32")
    found = evaluate(exact, text, other=cpumoe.load(bundled, kv="bf16"), window=128).figures()
    assert 0 < found["kl"] < 1e-3
    assert 0.97 < found["agreement"] <= 1
    assert abs(found["change"]) < 0.01


def test_bounded_logits_give_the_same(bundled, text, monkeypatch):
    model = cpumoe.load(bundled, kv="fp32", activations="fp32")
    whole = evaluate(model, text, other=model, window=128).figures()
    steps = []
    monkeypatch.setattr(module, "LOGIT_BYTES", 7 * 4 * model.spec.vocab)
    monkeypatch.setattr(module, "_BLOCK", 3 * model.spec.vocab)
    parts = evaluate(model, text, other=model, window=128, progress=lambda *s: steps.append(s))
    assert max(b[0] - a[0] for a, b in itertools.pairwise(steps)) == 7
    assert steps[-1] == (parts.tokens, parts.tokens)
    assert parts.tokens == whole["tokens"]
    assert parts.figures()["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert parts.figures()["kl"] == 0


def test_window_does_not_matter_beyond_the_first_token_when_it_holds_all():
    model = cpumoe.load(tiny("mixtral").path, kv="fp32")
    ids = prompt(20, seed=6)
    found = evaluate(model, ids, window=200).figures()
    assert found["tokens"] == 19
    assert found["windows"] == 1
    assert found["loss_se"] is None
    assert found["perplexity_se"] is None
    assert found["loss"] == pytest.approx(losses(model.logits(ids), ids).mean(), rel=1e-6)


def copied(bundled, path):
    """The bundled model with its own copy of all but the weights."""
    path.mkdir()
    for file in bundled.iterdir():
        if file.name == "model.safetensors":
            (path / file.name).symlink_to(file)
        elif file.suffix == ".json":
            shutil.copy(file, path)
    return path


def test_a_start_token_begins_every_window_and_is_not_scored(bundled, text, tmp_path):
    path = copied(bundled, tmp_path / "started")
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<|endoftext|>", "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    model = cpumoe.load(path, kv="fp32")
    evaluator = Evaluator(model, text, window=100)
    assert evaluator.start == [0]
    assert evaluator.stride == 99
    for _ in evaluator.run():
        pass
    ids = model.tokenizer.encode(text, special=False)
    assert evaluator.result.tokens == len(ids)
    want = 0.0
    for at in range(0, len(ids), 99):
        part = [0, *ids[at : at + 99]]
        want += losses(model.logits(part), part).sum()
    assert evaluator.result.figures()["loss"] == pytest.approx(want / len(ids), rel=1e-6)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 100])
@pytest.mark.parametrize("room", [1, 2, 8])
@pytest.mark.parametrize("started", [False, True])
def test_every_token_is_scored_at_most_once(tokens, room, started):
    for stride in range(1, room + 1):
        windows = cut_windows(tokens, room, stride, started=started)
        scored = [i for w in windows for i in range(w.first, w.end)]
        assert scored == sorted(set(scored))
        assert all(w.begin + (not started) <= w.first < w.end <= w.begin + room for w in windows)
        if started:
            assert scored == list(range(tokens))
        elif stride < room:
            assert scored == list(range(1, tokens))


def test_standard_errors():
    rng = np.random.default_rng(0)
    loss = rng.normal(2, 0.1, (30, 10)).sum(1)
    e = Evaluation(compared=True, total=300)
    e.sums = [(10.0, x, x + 10 * d, 0.0, 9.0) for x, d in zip(loss, [0.01, 0.03] * 15, strict=True)]
    found = e.figures()
    assert found["loss_se"] == pytest.approx((loss / 10).std(ddof=1) / np.sqrt(30))
    assert found["perplexity_se"] == pytest.approx(found["perplexity"] * found["loss_se"])
    # Paired: the spread of the text cancels, that of the differences stays.
    assert found["change"] == pytest.approx(np.expm1(0.02))
    error = np.std([0.01, 0.03] * 15, ddof=1) / np.sqrt(30)
    assert found["change_se"] == pytest.approx(np.exp(0.02) * error)
    assert found["change_se"] < found["perplexity_se"] / 5
    assert found["agreement"] == 0.9
    assert found["agreement_se"] == pytest.approx(0, abs=1e-12)
    e.sums.append((1.0, 50.0, 50.0, 0.0, 1.0))  # a short last window counts by its tokens
    assert e.figures()["loss"] == pytest.approx((loss.sum() + 50) / 301)


def test_an_overflow_is_told(bundled, text):
    """Losses beyond the range of exp give the largest float, not an exception."""
    e = Evaluation(compared=False, total=1, sums=[(1.0, 1e4, 0.0, 0.0, 0.0)])
    assert e.figures()["perplexity"] > 1e300


def test_nothing_measured_yet(bundled, text):
    evaluator = Evaluator(cpumoe.load(bundled), text)
    assert not evaluator.result.complete
    with pytest.raises(cpumoe.Error, match="at least one window"):
        evaluator.result.figures()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers(bundled, text, bad):
    model = cpumoe.load(bundled)
    right = model.decoder

    class Decoder:
        def forward(self, segments, all=False):
            logits = right.forward(segments, all=all)
            logits[-1, 5] = bad
            return logits

    model.decoder, exact = Decoder(), cpumoe.load(bundled)
    model.session = exact.session
    with pytest.raises(cpumoe.Error, match="must be a finite number"):
        evaluate(model, text, other=exact)


REFUSED = {
    "empty": ("", {}, "got 0 tokens"),
    "one token": ("a", {}, "got 1 token. Give a longer text"),
    "cut to one token": ("a cat sat", {"tokens": 1}, "got 1 token"),
    "no tokens": ("a cat sat", {"tokens": 0}, "tokens must be at least 1"),
    "window of one": ("a cat sat", {"window": 1}, "from 2 to 2048"),
    "window over the context": ("a cat sat", {"window": 4096}, "from 2 to 2048"),
    "stride of none": ("a cat sat", {"window": 8, "stride": 0}, "from 1 to 8"),
    "stride over the window": ("a cat sat", {"window": 8, "stride": 9}, "from 1 to 8"),
    "ids out of range": ([1, 10**6], {}, "must be in [0, "),
    "a lone surrogate": ("a \ud800 b", {}, "lone surrogate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, bundled):
    text, options, message = REFUSED[name]
    with pytest.raises(cpumoe.Error) as error:
        Evaluator(cpumoe.load(bundled), text, **options)
    assert message in str(error.value)


def test_another_tokenizer_is_refused(bundled, text, tmp_path):
    path = copied(bundled, tmp_path / "other")
    file = json.loads((path / "tokenizer.json").read_text())
    vocab = file["model"]["vocab"]
    model = cpumoe.load(bundled)
    used = set(model.tokenizer.encode(text, special=False))
    merged = {piece for pair in file["model"]["merges"] for piece in pair}
    # Two words that the text does not use, and no other word is merged from, change places.
    free = [w for w, i in vocab.items() if i not in used and w not in merged and len(w) > 2][:2]
    vocab[free[0]], vocab[free[1]] = vocab[free[1]], vocab[free[0]]
    (path / "tokenizer.json").write_text(json.dumps(file))
    other = cpumoe.load(path)
    assert other.tokenizer.encode(text) == model.tokenizer.encode(text)
    with pytest.raises(cpumoe.Error, match="is another text"):
        evaluate(model, text, other=other)
    file["model"]["merges"] = []
    (path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(cpumoe.Error, match="the text becomes other tokens"):
        evaluate(model, text, other=cpumoe.load(path))


def test_another_vocabulary_is_refused(bundled):
    model, other = cpumoe.load(bundled), cpumoe.load(tiny("mixtral").path)
    with pytest.raises(cpumoe.Error, match="must have the same vocabulary"):
        evaluate(model, [1, 2, 3], other=other)
