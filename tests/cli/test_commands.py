"""The command line as a user sees it: text on standard output, the rest on standard error."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

import cpumoe
from cpumoe.cli import _common as common
from cpumoe.cli import main
from cpumoe.engine.run import Stats


def cli(*args, stdin="", **env):
    """Run `cpumoe ARGS`; returns the finished process."""
    return subprocess.run(
        [sys.executable, "-m", "cpumoe.cli.main", *map(str, args)],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "100"} | env,
    )


def text(done):
    return done.stdout.decode()


def errors(done):
    return done.stderr.decode()


def test_help_lists_every_verb():
    done = cli("--help")
    assert done.returncode == 0
    for verb in main.verbs():
        assert verb in text(done)
    assert {"generate", "chat"} <= set(main.verbs())


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_help_names_every_default(verb):
    """An option without one says so; flags show theirs."""
    done = cli(verb, "--help", COLUMNS="300")
    rows = [r for r in text(done).splitlines() if r.startswith("│ --") and "<bool>" not in r]
    assert len(rows) > 10
    for row in rows:
        if "--file" not in row:
            assert "efault: " in row, row


def test_version():
    assert text(cli("--version")).strip() == f"cpumoe {cpumoe.__version__}"


def test_generate_prints_the_text_and_the_figures(bundled):
    args = ["Once upon a time", "--max-tokens", 12, "--temperature", 0]
    done = cli("generate", bundled, *args)
    want = cpumoe.load(bundled).generate("Once upon a time", max_tokens=12, temperature=0)
    assert done.returncode == 0
    assert text(done) == want.text + "\n"
    for part in ("prompt 4 tokens", "tokens/s", "decode 11 tokens", "GB/s = ", "% of this machine"):
        assert part in errors(done)


def test_generate_quietly(bundled):
    done = cli("generate", bundled, "The", "--max-tokens", 3, "--no-stats", "--seed", 1)
    assert errors(done) == ""


def test_prompt_from_standard_input_and_from_a_file(bundled, tmp_path):
    options = ["--max-tokens", 6, "--temperature", 0, "--no-stats"]
    want = text(cli("generate", bundled, "One cat 漢字", *options))
    assert text(cli("generate", bundled, "-", *options, stdin="One cat 漢字")) == want
    (tmp_path / "p.txt").write_text("One cat 漢字", encoding="utf-8")
    assert text(cli("generate", bundled, "--file", tmp_path / "p.txt", *options)) == want
    echoed = text(cli("generate", bundled, "One cat 漢字", *options, "--echo"))
    assert echoed == "One cat 漢字" + want


def test_generate_through_the_chat_template(bundled):
    done = cli("generate", bundled, "Hello", "--chat", "--max-tokens", 6, "--temperature", 0)
    assert (
        text(done).strip() == cpumoe.load(bundled).chat("Hello", max_tokens=6, temperature=0).text
    )


BAD = {
    "absent directory": (["/nonexistent", "x"], "no such directory"),
    "empty prompt": (["MODEL", ""], "prompt: must not be empty"),
    "no prompt": (["MODEL"], "give either PROMPT"),
    "two prompts": (["MODEL", "x", "--file", "y"], "give either PROMPT"),
    "absent file": (["MODEL", "--file", "/nonexistent"], "/nonexistent: No such file"),
    "long prompt": (["MODEL", "word " * 40, "--context", "16"], "at most 16 tokens"),
    "top_p": (["MODEL", "x", "--top-p", "0"], "cpumoe: --top-p: must be above 0"),
    "penalty": (["MODEL", "x", "--repetition-penalty", "-1"], "--repetition-penalty: must be"),
    "stop": (["MODEL", "x", "--stop", ""], "--stop: must be strings that are not empty"),
    "context": (["MODEL", "x", "--context", "9999"], "--context: must be from 1 to 2048"),
    "kv": (["MODEL", "x", "--kv", "int3"], "'int3' is not one of 'fp16'"),
    "activations": (["MODEL", "x", "--activations", "q"], "'q' is not one of 'auto', 'fp32'"),
    "threads": (["MODEL", "x", "--threads", "0"], "--threads"),
    "unknown option": (["MODEL", "x", "--frobnicate"], "frobnicate"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_a_sentence_and_exit_code_2(name, bundled):
    args, message = BAD[name]
    done = cli("generate", *(bundled if a == "MODEL" else a for a in args))
    assert done.returncode == 2
    assert message in " ".join(errors(done).split())
    assert "Traceback" not in errors(done)
    assert text(done) == ""


def test_debug_shows_the_traceback():
    for args in (
        ["--debug", "generate", "/nonexistent", "x"],
        ["generate", "/none", "x", "--debug"],
    ):
        assert "Traceback" in errors(cli(*args))


def test_standard_input_that_is_no_text(bundled):
    done = cli("generate", bundled, "-", stdin=b"\xff\xfe")
    assert done.returncode == 2
    assert "UTF-8" in errors(done)


def test_unknown_verb():
    done = cli("genrate")
    assert done.returncode == 2
    assert "genrate" in errors(done)


def test_reader_that_goes_away(bundled):
    command = (
        f"{sys.executable} -m cpumoe.cli.main generate {bundled} The --max-tokens 60 | head -c 1"
    )
    done = subprocess.run(command, shell=True, capture_output=True, timeout=300)
    assert "Traceback" not in errors(done)


def test_piped_chat_is_one_line_a_turn(bundled, tmp_path):
    lines = (
        f"Hello\n/undo\n/nonsense\nHello\n\nAnd then?\n/save {tmp_path}/talk.json\n/exit\nignored\n"
    )
    done = cli("chat", bundled, "--max-tokens", 6, "--temperature", 0, stdin=lines)
    assert done.returncode == 0
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [m["content"] for m in saved[::2]] == ["Hello", "And then?"]
    answers = [m["content"] for m in saved[1::2]]
    assert text(done) == answers[0] + "\n" + answers[0] + "\n" + answers[1] + "\n"
    assert "No command /nonsense" in errors(done)


def test_piped_chat_reports_errors(bundled):
    done = cli("chat", bundled, "--context", 16, stdin="word " * 40 + "\n")
    assert done.returncode == 2
    assert "shorter than the context" in errors(done)


def test_piped_chat_names_a_line_that_is_no_text(bundled):
    lines = b"/nonsense\nHello\nab\xff\nHello\n"
    done = cli("chat", bundled, "--max-tokens", 3, "--temperature", 0, stdin=lines)
    assert done.returncode == 2
    assert "chat: line 3 of the input must be UTF-8 text; got byte 0xff" in errors(done)
    assert "No command /nonsense" in errors(done)
    assert text(done).count("\n") == 1  # the turn before it was answered
    assert "Traceback" not in errors(done)


def test_closing_line_says_where_the_weights_came_from():
    stats = Stats(prompt_tokens=4, prompt_seconds=1, decode_tokens=2, decode_seconds=1)
    stats.weight_bytes = 4 * 10**9
    said = common.describe_stats(stats, 8.0, cached=False)
    assert said.endswith("weights 4.00 GB/s = 50 % of this machine's 8.0 GB/s read bandwidth")
    assert common.describe_stats(stats, 8.0, cached=True).endswith(", from its caches")
    assert common.describe_stats(stats, 3.0, cached=False).endswith(", from its caches")


@pytest.mark.parametrize(("weight_bytes", "cached"), [(2 * 10**6, True), (10**10, False)])
def test_closing_line_is_about_the_whole_machine(monkeypatch, weight_bytes, cached):
    """One worker's figures stand beside the bandwidth of the default number of threads."""
    used = []

    class Probe:
        def __init__(self, size):
            pass

        def read_gb_per_s(self, executor):
            used.append(executor.threads)
            return 100.0

    class Machine:
        l3, default_threads = 32 << 20, 2

        @classmethod
        def probe(cls):
            return cls

    class Loaded:
        executor, nbytes = cpumoe.Executor(1), 10**11

    monkeypatch.setattr("cpumoe._core.Probe", Probe)
    monkeypatch.setattr("cpumoe._core.Machine", Machine)
    stats = Stats(decode_tokens=2, decode_seconds=1, weight_bytes=2 * weight_bytes)
    assert common.closing_line(Loaded, stats).endswith(", from its caches") == cached
    assert set(used) == {2}
    used.clear()
    assert "decode" not in common.closing_line(Loaded, Stats(prompt_tokens=1))
    assert not used


@pytest.mark.parametrize("verb", [["doctor"], ["bench"], ["generate"], ["chat"]])
def test_help_offers_no_completion(verb):
    done = cli(*verb, "--help")
    assert done.returncode == 0
    assert "completion" not in text(done)


def hear_interrupts():
    """A shell's background job, as CI may be, ignores Ctrl-C and hands that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """`cpumoe ARGS` on a pseudo-terminal."""

    def __init__(self, *args):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            hear_interrupts()
            os.execv(sys.executable, [sys.executable, "-m", "cpumoe.cli.main", *map(str, args)])
        self.seen = b""

    def until(self, *wanted, seconds=120):
        """Read on until one of `wanted` has come; returns the text before it, and it."""
        end = time.monotonic() + seconds
        while True:
            text = self.seen.decode(errors="replace")
            hits = [(text.index(w), w) for w in wanted if w in text]
            if hits:
                at, hit = min(hits)
                self.seen = text[at + len(hit) :].encode()
                return text[:at], hit
            assert time.monotonic() < end, text
            if select.select([self.fd], [], [], 0.2)[0]:
                self.seen += os.read(self.fd, 4096)

    def send(self, keys):
        os.write(self.fd, keys)

    def close(self):
        """Exit status; the program must end by itself."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if select.select([self.fd], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # the other end has closed
                    self.seen += os.read(self.fd, 4096)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("did not end")


def test_chat_on_a_terminal_survives_an_interrupt(bundled):
    terminal = Terminal("chat", bundled, "--max-tokens", 1500, "--temperature", 1, "--seed", 1)
    terminal.until("> ")
    time.sleep(0.5)  # between prompt and wait, CPython's input() keeps a signal until the next key
    terminal.send(b"\x03")
    terminal.until("Ctrl-D or /exit leaves.")
    terminal.until("> ")
    for _ in range(20):  # an answer may end by itself before the key arrives: ask again
        terminal.send(b"Tell me a long story.\r")
        terminal.until("story.")
        terminal.until(" ")
        terminal.send(b"\x03")
        if terminal.until("[interrupted", "> ")[1] == "[interrupted":
            terminal.until("> ")
            break
    else:
        raise AssertionError("never interrupted")
    terminal.send(b"/stats\r")
    terminal.until("> ")
    terminal.send(b"Hi\r")
    terminal.until("tokens/s")
    terminal.until("> ")
    terminal.send(b"\x04")
    assert terminal.close() == 0


def test_interrupted_generate_exits_130(bundled):
    command = [sys.executable, "-m", "cpumoe.cli.main", "generate", str(bundled), "Once"]
    process = subprocess.Popen(
        [*command, "--max-tokens", "1900", "--temperature", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
    )
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert b"Traceback" not in stderr
    assert process.returncode in (130, 0)  # 0: it had just finished
