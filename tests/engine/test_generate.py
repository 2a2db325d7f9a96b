"""Model: prompts, sessions, batches, stops, the context, and what is refused."""

import gc
import json
import threading

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import cpumoe
from cpumoe import Error
from cpumoe.engine import run
from hostile import checkpoint
from tiny_models import prompt, tiny


@pytest.fixture(scope="module")
def model():
    return cpumoe.load(tiny("qwen3_moe").path, kv="fp32")


@pytest.fixture(scope="module")
def story(bundled):
    return cpumoe.load(bundled, kv="fp32")


def test_pieces_are_the_text(story):
    stream = story.stream("Once upon a time", max_tokens=30, temperature=0)
    text = "".join(stream)
    done = stream.completion
    assert text == done.text
    assert len(done.ids) <= 30
    ids = story.tokenizer.encode("Once upon a time")
    whole = story.tokenizer.decode(ids + done.ids)
    assert whole == "Once upon a time" + done.text


def test_stats_count_what_was_done(model):
    completion = model.generate(prompt(9), max_tokens=5, temperature=0)
    stats = completion.stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.decode_tokens) == (9, 0, 4)
    assert stats.prompt_seconds > 0
    assert stats.decode_seconds > 0
    # Each step reads at least the head and the attention of every layer, at most all weights.
    head = model.spec.head.w.nbytes
    assert 4 * head < stats.weight_bytes <= 4 * model.nbytes


def test_batch_equals_one_by_one(model):
    prompts = [prompt(n, seed=n) for n in (3, 11, 6, 1)]
    batch = model.generate(prompts, max_tokens=20, temperature=0)
    alone = [model.generate(p, max_tokens=20, temperature=0) for p in prompts]
    assert [c.ids for c in batch] == [c.ids for c in alone]


def test_batch_of_texts(story):
    texts = ["Once upon a time", "The cat"]
    batch = story.generate(texts, max_tokens=8, temperature=0)
    assert [c.text for c in batch] == [
        story.generate(t, max_tokens=8, temperature=0).text for t in texts
    ]


def test_seed_repeats_a_text(story):
    def text(seed):
        return story.generate("The", max_tokens=20, temperature=1.5, seed=seed).text

    assert text(1) == text(1)
    assert len({text(s) for s in range(4)}) > 1


def test_stop_string(story):
    free = story.generate("Once upon a time", max_tokens=40, temperature=0, ignore_eos=True).text
    stop = free[10:14]
    done = story.generate("Once upon a time", max_tokens=40, temperature=0, stop=stop)
    assert done.text == free[: free.index(stop)]
    assert done.finish == "stop"


def test_end_of_text_token_stops_and_is_not_shown(story):
    free = story.generate("Once", max_tokens=12, temperature=0, ignore_eos=True)
    request = story.request("Once", story.params(max_tokens=12, temperature=0))
    request.eos_ids = frozenset({free.ids[6]})
    first = free.ids.index(free.ids[6])
    stream = story.stream_request(request)
    text = "".join(stream)
    assert stream.completion.finish == "stop"
    assert stream.completion.ids == free.ids[: first + 1]
    assert free.text.startswith(text)


def test_context_ends_generation(tmp_path):
    small = cpumoe.load(checkpoint(tmp_path), context=10)
    done = small.generate([3, 4, 5], temperature=0, ignore_eos=True)
    assert done.finish == "context"
    assert len(done.ids) == 8  # 3 + 7 fill the cache, the last token needs no room


def test_prompt_as_long_as_the_context(tmp_path):
    small = cpumoe.load(checkpoint(tmp_path), context=4)
    done = small.generate([3, 4, 5, 6], temperature=0, ignore_eos=True)
    assert (done.finish, len(done.ids)) == ("context", 1)
    with pytest.raises(Error, match=r"at most 4 tokens \(the context\); got 5"):
        small.generate([3, 4, 5, 6, 7])


@pytest.mark.parametrize("empty", ["", []])
def test_empty_prompt(story, empty):
    with pytest.raises(Error, match="prompt: must"):
        story.generate(empty)
    with pytest.raises(Error, match="prompt: must"):
        story.logits(empty)


@pytest.mark.parametrize("ids", [[99], [-1], [2**31], [3, 2**40]])
def test_ids_out_of_range(model, ids):
    with pytest.raises(Error, match=r"token ids must be in \[0, 99\)"):
        model.generate(ids)


@pytest.mark.parametrize(
    "bad", [[1.5], [None], [{}], [[1], [2.5]], b"text", bytearray(b"a"), [True, 3], 7, None]
)
def test_prompts_that_are_none(model, bad):
    with pytest.raises(Error, match="prompt: must be text or token ids"):
        model.generate(bad)


def test_prompts_as_arrays(model):
    ids = np.array([[3, 4, 5], [6, 7, 8]], np.int64)
    batch = model.generate(ids, max_tokens=3, temperature=0)
    assert [c.ids for c in batch] == [
        model.generate(row, max_tokens=3, temperature=0).ids for row in ids
    ]


def test_unknown_sampling_name(model):
    for value in (1.0, None):
        with pytest.raises(Error, match=r"generate: .*among temperature, top_k.*got temprature\."):
            model.generate([1], temprature=value)


def test_lone_surrogate(story):
    with pytest.raises(Error, match="valid Unicode"):
        story.generate("a\ud800b")


def test_native_arguments_are_checked(model):
    cache = model.session().cache
    forward = model.decoder.forward
    good = np.array([1], np.int32)
    bad = [[], [cache], [(cache,)], [(cache, [1])], [(cache, good.astype(np.int64))], [(3, good)]]
    bad += [[(cache, good[:0])], [(cache, np.array([[1]], np.int32))], [(None, good)], 7]
    bad += [[(cache, np.arange(4, dtype=np.int32)[::2])], [(cache, good), (cache, good)]]
    for segments in bad:
        with pytest.raises((Error, TypeError)):
            forward(segments)
    assert cache.length == 0
    with pytest.raises(Error, match="truncate"):
        cache.truncate(5)


def test_caches_outlive_the_segments_they_came_from(model):
    """Nothing but the call itself holds the caches of a generator."""
    ids = np.array(prompt(6), np.int32)
    want = model.decoder.forward([(model.session().cache, ids)])

    def segments():
        for _ in range(20):
            yield model.session().cache, ids.copy()
            gc.collect()

    got = model.decoder.forward(segments())
    assert got.shape == (20, 99)
    assert np.abs(got - want).max() <= 2.0**-10 * np.abs(want).max()


@pytest.mark.parametrize("second", ["truncate", "another decoder"])
def test_a_cache_serves_one_call_at_a_time(story, second):
    """While one thread's forward() runs, the cache is refused to everybody else."""
    cache, other = story.session().cache, cpumoe.load(story.path, kv="fp32")
    ids, refused = np.full(story.context, 3, np.int32), []

    def call(work):
        try:
            work()
        except Error as e:
            refused.append(str(e))

    for _ in range(50):  # until the two meet; the first time as a rule
        cache.truncate(0)
        worker = threading.Thread(
            target=call, args=(lambda: story.decoder.forward([(cache, ids)]),)
        )
        worker.start()
        while worker.is_alive() and not refused:
            if second == "truncate":
                call(lambda: cache.truncate(0))
            elif cache.length == 0:
                call(lambda: other.decoder.forward([(cache, ids[:1])]))
        worker.join()
        refused[:] = [r for r in refused if "context" not in r and "capacity" not in r]
        if refused:
            break
    assert refused
    for text in refused:
        assert text.startswith("KvCache: must be used by one call at a time; got a second")
    cache.truncate(0)  # released


def test_a_session_serves_one_generation_at_a_time(model):
    session, ids = model.session(), prompt(8)
    want = model.generate(ids, max_tokens=6, temperature=0).ids
    busy = r"^session: must serve one generation at a time; got"

    def stream():
        return model.stream(ids, session=session, max_tokens=6, temperature=0)

    first, second = stream(), stream()
    next(first)
    with pytest.raises(Error, match=busy):
        next(second)
    assert len(first.read()) == 0  # this model has no tokenizer
    assert first.completion.ids == want
    third = stream()
    next(third)
    third.close()
    params = model.params(max_tokens=2, temperature=0)
    twice = [model.request(ids, params, session) for _ in range(2)]
    with pytest.raises(Error, match=busy):
        list(run.run(model.decoder, twice, run.Stats()))
    fourth = stream()
    fourth.read()
    assert fourth.completion.ids == want


def test_session_reuses_the_common_prefix(model):
    session, ids = model.session(), prompt(30)
    list(model.stream(ids, session=session, max_tokens=4, temperature=0))
    other = [*ids[:20], 5, 6, 7]
    stream = model.stream(other, session=session, max_tokens=6, temperature=0)
    list(stream)
    assert stream.completion.stats.cached_tokens == 20
    assert stream.completion.stats.prompt_tokens == 3
    assert stream.completion.ids == model.generate(other, max_tokens=6, temperature=0).ids


def test_same_prompt_again_computes_one_token(model):
    session, ids = model.session(), prompt(12)
    first = model.stream(ids, session=session, max_tokens=3, temperature=0)
    list(first)
    again = model.stream(ids, session=session, max_tokens=3, temperature=0)
    list(again)
    assert again.completion.stats.prompt_tokens == 1
    assert again.completion.ids == first.completion.ids


class Interrupting:
    """A decoder whose n-th call ends in KeyboardInterrupt, before or after the native work."""

    def __init__(self, decoder, at, after):
        self.decoder, self.left, self.after = decoder, at, after
        self.last_weight_bytes = 0

    def forward(self, segments):
        self.left -= 1
        if self.left:
            return self.decoder.forward(segments)
        if self.after:
            self.decoder.forward(segments)
        raise KeyboardInterrupt


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_interrupt_leaves_the_session_usable(model, at, after):
    session, ids = model.session(), prompt(10)
    request = model.request(ids, model.params(max_tokens=8, temperature=0), session)
    with pytest.raises(KeyboardInterrupt):
        for _ in run.run(Interrupting(model.decoder, at, after), [request], run.Stats()):
            pass
    stream = model.stream([*ids, 1, 2], session=session, max_tokens=6, temperature=0)
    list(stream)
    want = model.generate([*ids, 1, 2], max_tokens=6, temperature=0)
    assert stream.completion.ids == want.ids


def test_closing_a_stream_leaves_the_session_usable(model):
    session, ids = model.session(), prompt(10)
    stream = model.stream(ids, session=session, max_tokens=20, temperature=0)
    next(stream)
    stream.close()
    assert len(stream.completion.ids) == 1
    again = model.stream(ids, session=session, max_tokens=5, temperature=0)
    list(again)
    assert again.completion.ids == model.generate(ids, max_tokens=5, temperature=0).ids


def test_long_prompts_are_prefilled_in_parts(model, monkeypatch):
    ids, seen = prompt(70), []
    want = model.generate([ids, ids[:33]], max_tokens=4, temperature=0)
    monkeypatch.setattr(run, "PREFILL_TOKENS", 16)
    got = model.generate([ids, ids[:33]], max_tokens=4, temperature=0)
    assert [c.ids for c in got] == [c.ids for c in want]
    list(model.stream(ids, max_tokens=1, progress=lambda *a: seen.append(a)))
    assert seen == [(16, 70), (32, 70), (48, 70), (64, 70), (70, 70)]


def test_nan_from_the_router_is_refused_and_the_cache_survives(tmp_path):
    path = checkpoint(tmp_path)
    loaded = cpumoe.load(path, kv="fp32")
    router = loaded.checkpoint.tensors["model.layers.0.mlp.gate.weight"]
    with (path / "model.safetensors").open("r+b") as f:
        f.seek(router.offset)
        f.write(np.full(16, np.nan, np.float32).tobytes())
    session = loaded.session()
    with pytest.raises(Error, match=r"NaN|finite"):
        list(loaded.stream([3, 4], session=session))
    assert session.cache.length == 0


def tokenizer_file(path, eos=None, **config):
    """A word tokenizer for 32 ids, with tokenizer_config.json."""
    vocab = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, 32)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<s>", "</s>"])
    made.enable_truncation(4)
    made.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | config
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_missing_tokenizer(tmp_path):
    loaded = cpumoe.load(checkpoint(tmp_path))
    with pytest.raises(Error, match=r"tokenizer\.json is missing"):
        loaded.generate("text")
    with pytest.raises(Error, match=r"stop: needs tokenizer\.json"):
        loaded.generate([3], stop="x")
    assert loaded.generate([3], max_tokens=2, temperature=0).text == ""


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": 3}', "\x00" * 100])
def test_damaged_tokenizer(tmp_path, content):
    (checkpoint(tmp_path) / "tokenizer.json").write_text(content)
    with pytest.raises(Error, match=r"tokenizer\.json: cannot be read"):
        cpumoe.load(tmp_path).generate("text")


def test_beginning_of_text_and_no_truncation(tmp_path):
    path = checkpoint(tmp_path)
    words = "w3 w4 w5 w6 w7 w8"
    plain = cpumoe.load(tokenizer_file(path)).tokenizer
    assert plain.encode(words) == [3, 4, 5, 6, 7, 8]
    with_bos = cpumoe.load(tokenizer_file(path, add_bos_token=True)).tokenizer
    assert with_bos.encode(words) == [0, 3, 4, 5, 6, 7, 8]
    assert with_bos.encode(words, special=False) == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": [4, 5]}, {"eos_token_id": 6}, {4, 5}),
        ({}, {"eos_token_id": 6}, {6}),
        (None, {"eos_token_id": [6, 7]}, {6, 7}),
        (None, {"eos_token_id": None}, {1}),
    ],
)
def test_end_of_text_ids(tmp_path, generation, config, want):
    path = tokenizer_file(checkpoint(tmp_path, config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    assert cpumoe.load(path).defaults.eos_ids == want


def test_generation_config_defaults(tmp_path):
    path = checkpoint(tmp_path)
    assert cpumoe.load(path).params().greedy
    values = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7}
    (path / "generation_config.json").write_text(json.dumps(values))
    params = cpumoe.load(path).params(top_p=0.5, seed=None)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 50, 0.5)
    assert (params.max_tokens, params.seed) == (7, None)


@pytest.mark.parametrize(
    "values", [{"do_sample": 1}, {"do_sample": True, "temperature": "hot"}, {"eos_token_id": "x"}]
)
def test_bad_generation_config(tmp_path, values):
    path = checkpoint(tmp_path)
    (path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(Error, match=r"generation_config\.json"):
        cpumoe.load(path).generate([3])
