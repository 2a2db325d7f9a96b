"""Chat templates against Transformers, and conversations that survive interrupts."""

import json

import pytest
from transformers import AutoTokenizer

import cpumoe
from cpumoe import Error
from cpumoe.engine import Conversation
from cpumoe.engine.template import ChatTemplate, find_template

TALK = [
    {"role": "user", "content": "Hi & <you>"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
]
# What templates on the Hub use: loops, trimmed blocks, filters, namespaces, helpers.
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}",
    "trimmed": (
        "{{ bos_token }}\n{%- set ns = namespace(n=0) %}\n{% for m in messages %}\n"
        "    {% if m.role == 'user' %}\n[INST] {{ m.content | trim }} [/INST]\n    {% else %}\n"
        "{{ m.content }}{{ eos_token }}\n    {% endif %}\n{% set ns.n = ns.n + 1 %}{% endfor %}\n"
        "{{ ns.n }}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "undefined": "{{ messages[0].reasoning_content }}{% if tools %}T{% endif %}x",
}


@pytest.fixture(scope="module")
def model(bundled):
    return cpumoe.load(bundled)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name, bundled):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    hf = AutoTokenizer.from_pretrained(bundled, bos_token="<s>", eos_token="</s>")
    want = hf.apply_chat_template(
        TALK, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    template = ChatTemplate(TEMPLATES[name], special)
    assert template.render(TALK, add_generation_prompt=True) == want


def test_bundled_model_encodes_as_transformers(model, bundled):
    hf = AutoTokenizer.from_pretrained(bundled)
    text = "A dog, 漢字 and 👍🏽 e\u0301.\n\n  Two  spaces"
    assert model.tokenizer.encode(text) == hf(text).input_ids
    want = hf.apply_chat_template(TALK, add_generation_prompt=True, return_dict=True).input_ids
    assert model.tokenizer.encode_chat(TALK) == want


def test_raise_exception_and_bad_templates():
    with pytest.raises(Error, match="cannot render these messages; no system role"):
        ChatTemplate("{{ raise_exception('no system role') }}", {}).render(
            TALK, add_generation_prompt=True
        )
    with pytest.raises(Error, match="must be a Jinja template"):
        ChatTemplate("{% for %}", {})
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([], add_generation_prompt=True)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append({}) }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_templates_run_in_a_sandbox(attack):
    with pytest.raises(Error, match="cannot render"):
        ChatTemplate(attack, {}).render(TALK, add_generation_prompt=True)


def test_where_templates_come_from(tmp_path):
    assert find_template(tmp_path, {}) is None
    assert find_template(tmp_path, {"chat_template": "A"}) == "A"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert find_template(tmp_path, {"chat_template": named}) == "D"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "B"}))
    assert find_template(tmp_path, {"chat_template": "A"}) == "B"
    (tmp_path / "chat_template.jinja").write_text("C\n")
    assert find_template(tmp_path, {"chat_template": "A"}) == "C\n"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(Error, match="chat_template must be text"):
        find_template(tmp_path, {"chat_template": 3})


def test_chat_is_one_turn(model):
    done = model.chat("Tell me a story.", max_tokens=8, temperature=0)
    assert (
        done.text == Conversation(model).say("Tell me a story.", max_tokens=8, temperature=0).read()
    )


def test_turns_reuse_the_cache(model):
    talk = Conversation(model)
    talk.say("Tell me a story.", max_tokens=12, temperature=0).read()
    stream = talk.say("And then?", max_tokens=6, temperature=0)
    answer = stream.read()
    stats = stream.completion.stats
    assert stats.cached_tokens >= len(model.tokenizer.encode_chat(talk.messages[:1]))
    alone = Conversation(model)
    alone.messages = talk.messages[:2]
    assert alone.say("And then?", max_tokens=6, temperature=0).read() == answer
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2


def test_closing_an_answer_keeps_what_has_come(model):
    talk = Conversation(model)
    stream = talk.say("Tell me a story.", max_tokens=50, temperature=0, ignore_eos=True)
    got = next(stream) + next(stream)
    stream.close()
    assert talk.messages[-1] == {"role": "assistant", "content": got}
    assert talk.say("Go on.", max_tokens=3, temperature=0).read() is not None


def test_interrupt_in_prefill_takes_the_question_back(model, monkeypatch):
    talk = Conversation(model)
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise KeyboardInterrupt

        patch.setattr("cpumoe.engine.run._forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            talk.say("Tell me a story.").read()
    assert talk.messages == []
    assert talk.say("Tell me a story.", max_tokens=3, temperature=0).read()


def test_undo_reset_system(model):
    talk = Conversation(model, system="Be kind.")
    assert not talk.undo()
    talk.say("Hi", max_tokens=2, temperature=0).read()
    assert talk.undo()
    assert talk.messages == [{"role": "system", "content": "Be kind."}]
    talk.say("Hi", max_tokens=2, temperature=0).read()
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be kind."}]


def test_save_and_load(model, tmp_path):
    talk, other = Conversation(model), Conversation(model)
    talk.say("Hi 👍", max_tokens=2, temperature=0).read()
    talk.save(tmp_path / "talk.json")
    other.load(tmp_path / "talk.json")
    assert other.messages == talk.messages
    (tmp_path / "bad.json").write_text('{"messages": [3]}')
    with pytest.raises(Error, match="list of messages"):
        other.load(tmp_path / "bad.json")


def test_empty_message_and_full_context(model, bundled):
    with pytest.raises(Error, match="message: must not be empty"):
        Conversation(model).say("  \n")
    small = Conversation(cpumoe.load(bundled, context=16))
    with pytest.raises(Error, match="conversation: must be shorter than the context of 16"):
        small.say("word " * 40)
    assert small.messages == []
