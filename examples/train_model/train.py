"""Train the bundled Mixture-of-Experts model on CPU; resumable.

    python train.py --corpus WORK/corpus --work WORK/run --minutes 60 --export models/tiny-stories-moe

``--minutes`` is the length of the whole run: the learning rate follows the share of it that has been
spent (warm-up, then cosine), so the run anneals fully however fast the machine is.  A run that was
stopped goes on from its last checkpoint when the same command is given again.  ``--steps N`` makes the
schedule count steps instead, which gives the same weights again on the same machine and library
versions.  ``--export`` writes the model folder at the end; with ``--minutes 0`` it only exports.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

# glibc gives every large temporary back to the kernel by default; keeping them saves ~20 % of a step.
_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
if __name__ == "__main__" and "MALLOC_MMAP_MAX_" not in os.environ:
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_MALLOC})
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from common import DOMAINS, load_domain, make_model, perplexity
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

SHARES = {"stories": 0.45, "dialogues": 0.30, "shakespeare": 0.10, "bible": 0.15}


class Exchange:
    """Averages gradients between worker processes through shared memory.

    One thread per process and one meeting per step: on a busy machine this wastes far less time than
    the threads of one process, which meet in every operation.  Two buffers are used in turn, so one
    barrier per step is enough.
    """

    def __init__(self, workers: int, size: int) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.workers = workers
        self.barrier = context.Barrier(workers)
        self.grads = torch.zeros(2, workers, size).share_memory_()
        self.progress = torch.zeros(2).share_memory_()

    def average(
        self, step: int, rank: int, parameters: list[torch.nn.Parameter], progress: float
    ) -> float:
        """Replace the gradients by their mean over the workers; returns worker 0's progress."""
        side = self.grads[step % 2]
        torch.cat([p.grad.flatten() for p in parameters], out=side[rank])
        if rank == 0:
            self.progress[step % 2] = progress
        self.barrier.wait()
        mean = side.mean(0)
        for p, g in zip(parameters, mean.split([p.numel() for p in parameters]), strict=False):
            p.grad.copy_(g.view_as(p.grad))
        return self.progress[step % 2].item()


class Run:
    """A training run: model, optimizer, counters, and how to store them."""

    def __init__(
        self, args: argparse.Namespace, rank: int = 0, exchange: Exchange | None = None
    ) -> None:
        self.args, self.rank, self.exchange = args, rank, exchange
        self.data = {
            n: load_domain(args.corpus, "train", n)
            for n in DOMAINS
            if (args.corpus / "train" / f"{n}.npy").exists()
        }
        self.names = list(self.data)
        shares = np.array([SHARES[n] for n in self.names])
        self.shares = shares / shares.sum()
        vocab = json.loads((args.corpus / "tokenizer.json").read_text(encoding="utf-8"))
        self.vocab_size = len(vocab["model"]["vocab"])
        torch.manual_seed(args.seed)
        self.model = make_model(self.vocab_size)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=args.lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.state = {"step": 0, "seconds": 0.0, "cpu_seconds": 0.0, "tokens": 0, "log": []}
        self.checkpoint = args.work / "checkpoint.pt"
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=False)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.state = saved["state"]
        self.progress = self.measure()

    def save(self) -> None:
        """Write the checkpoint; a crash leaves the former one."""
        part = self.checkpoint.with_suffix(".part")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "state": self.state,
            },
            part,
        )
        os.replace(part, self.checkpoint)

    def measure(self) -> float:
        """Share of the run that is done, by this worker's counters."""
        if self.args.steps:
            return self.state["step"] / self.args.steps
        return self.state["seconds"] / (self.args.minutes * 60) if self.args.minutes else 1.0

    def learning_rate(self) -> float:
        """Warm-up over 150 steps, then cosine down to 1 %."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress)))
        return self.args.lr * min(1.0, (self.state["step"] + 1) / 150) * (0.01 + 0.99 * cosine)

    def batch(self) -> torch.Tensor:
        """Random windows; the choice depends on the step only, so that a run can be resumed."""
        rng = np.random.default_rng((self.args.seed, self.state["step"]))
        seq = self.args.seq if self.progress > 0.6 else self.args.seq // 2
        rows = []
        for _ in range(self.args.batch_tokens // seq):
            ids = self.data[self.names[rng.choice(len(self.names), p=self.shares)]]
            start = rng.integers(0, len(ids) - seq)
            rows.append(ids[start : start + seq + 1])
        self.state["tokens"] += len(rows) * seq
        workers = self.exchange.workers if self.exchange else 1
        return torch.from_numpy(np.stack(rows[self.rank :: workers]))

    def step(self) -> tuple[float, float]:
        """One optimizer step; returns cross-entropy and balance loss."""
        config = self.model.config
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        x = self.batch()
        out = self.model(input_ids=x[:, :-1], use_cache=False)
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), x[:, 1:].flatten())
        balance = load_balancing_loss_func(
            out.router_logits, config.num_experts, config.num_experts_per_tok
        )
        (loss + config.router_aux_loss_coef * balance).backward()
        self.state["step"] += 1
        if self.exchange:
            self.progress = self.exchange.average(
                self.state["step"], self.rank, list(self.model.parameters()), self.measure()
            )
        else:
            self.progress = self.measure()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), balance.item()

    def held_out(self, max_tokens: int = 6144) -> dict[str, float]:
        """Perplexity per domain on a part of the held-out text."""
        return {
            n: round(
                perplexity(
                    self.model, load_domain(self.args.corpus, "heldout", n), max_tokens=max_tokens
                )["ppl"],
                3,
            )
            for n in self.names
        }

    def train(self) -> None:
        """Until the progress is 1."""
        _args, state = self.args, self.state
        self.model.train()
        wall, cpu = time.time(), time.process_time()
        base, base_cpu = state["seconds"], state["cpu_seconds"]
        mark, mark_tokens, average = wall, state["tokens"], None
        while self.progress < 1.0:
            loss, balance = self.step()
            average = loss if average is None else 0.97 * average + 0.03 * loss
            now = time.time()
            state["seconds"] = base + now - wall
            state["cpu_seconds"] = base_cpu + (time.process_time() - cpu) * (
                self.exchange.workers if self.exchange else 1
            )
            if self.rank:
                continue
            if state["step"] % 25 == 0:
                speed = (state["tokens"] - mark_tokens) / (now - mark)
                mark, mark_tokens = now, state["tokens"]
                print(
                    f"{time.strftime('%H:%M:%S')} step {state['step']} {100 * self.progress:.1f} % loss {average:.3f} "
                    f"balance {balance:.3f} lr {self.learning_rate():.2e} {speed:.0f} tok/s",
                    flush=True,
                )
            if state["step"] % 100 == 0:
                self.save()
            if state["step"] % 500 == 0:
                scores = self.held_out()
                state["log"].append(
                    {
                        "step": state["step"],
                        "tokens": state["tokens"],
                        "minutes": round(state["seconds"] / 60, 2),
                        "loss": round(average, 4),
                        "ppl": scores,
                    }
                )
                print("held-out perplexity", scores, flush=True)
        if self.rank:
            return
        self.save()
        print(
            f"done: {state['step']} steps, {state['tokens']} tokens, {state['seconds'] / 60:.1f} min, "
            f"{state['cpu_seconds'] / 60:.1f} CPU-min",
            flush=True,
        )


def work(rank: int, args: argparse.Namespace, exchange: Exchange | None) -> None:
    """One worker process."""
    torch.set_num_threads(1)
    Run(args, rank, exchange).train()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder written by corpus.py")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--minutes", type=float, default=60, help="length of the whole run; 0: only export"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="length of the whole run in steps, instead of minutes"
    )
    parser.add_argument("--batch-tokens", type=int, default=3072)
    parser.add_argument(
        "--seq",
        type=int,
        default=512,
        help="window length; half of it in the first 60 %% of the run",
    )
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--export", type=Path, help="model folder to write when the run is done")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.minutes or args.steps:
        probe = Run(args)
        size = sum(p.numel() for p in probe.model.parameters())
        experts = sum(p.numel() for n, p in probe.model.named_parameters() if ".experts." in n)
        print(
            f"{size} parameters, {size - experts * 3 // 4} active per token; from step {probe.state['step']}",
            flush=True,
        )
        if args.workers > 1:
            torch.multiprocessing.spawn(
                work, (args, Exchange(args.workers, size)), nprocs=args.workers
            )
        else:
            work(0, args, None)
    if args.export:
        from export import export

        run = Run(args)
        export(run.model, args.corpus, args.export, run.state)


if __name__ == "__main__":
    main()
