"""Trained tokens per second on the demo job's shape. Run it as a script, with OMP_NUM_THREADS=1.

Rows are prompts of 3 to 32 symbols (log-normal, median 8) and answers of the same length, 32 groups of 8, trained in
4 mini-batches with a clipped policy-gradient loss. A token counts as trained when it is in the loss mask. Seconds are
this process's CPU seconds, because other work on the machine must not count. The padded loop is what a plain training
script does with transformers: rows padded to the longest of their mini-batch, logits for every position.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch

from headrace.contract.columns import Batch, Ragged
from headrace.contract.loss import LossInputs, LossOutput, LossSpec
from headrace.contract.training import TrainingContext
from headrace_torch.training import TorchTrainingEngine, TorchTrainingSettings

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz="
MODEL = {
    "architecture": "llama",
    "alphabet": ALPHABET,
    "hidden_size": 128,
    "layers": 2,
    "heads": 4,
    "intermediate_size": 344,
    "max_length": 128,
}


def clipped(inputs: LossInputs) -> LossOutput:
    """Clipped policy gradient, with the metrics a real one reports."""
    ratio = (inputs.logprobs - inputs.columns["behaviour_logprobs"]).exp()
    advantage = inputs.columns["advantages"]
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    clipped_share = (ratio.detach() > 1.28).float()
    return LossOutput(
        numerator=(inputs.weights * loss).sum(),
        metrics={
            "policy/ratio_max": (ratio.detach().max(), 1, "max"),
            "policy/clip_share_high": (clipped_share.sum(), len(ratio), "mean"),
        },
    )


def make_batch(generator: np.random.Generator, *, groups: int, size: int, error: float) -> Batch:
    """Sorting tasks whose answers have each symbol replaced with probability ``error``."""
    rows, masks = [], []
    for _ in range(groups):
        length = int(np.clip(np.exp(generator.normal(np.log(8), 0.6)), 3, 32))
        symbols = generator.choice(36, length, replace=False) + 3
        prompt = np.concatenate([[1], symbols, [3 + 36]])
        for _ in range(size):
            noise = generator.random(length) < error
            answer = np.where(noise, generator.integers(3, 39, length), np.sort(symbols))
            rows.append(np.concatenate([prompt, answer, [2]]).astype(np.int32))
            masks.append(np.arange(len(rows[-1])) >= len(prompt))
    tokens, mask = Ragged.from_arrays(rows), Ragged.from_arrays(masks)
    total = len(tokens.values)
    return Batch(
        rows=np.arange(len(rows)),
        columns={
            "tokens": tokens,
            "loss_mask": mask,
            "loss_weights": tokens.like(mask.values.astype(np.float32)),
            "advantages": tokens.like(generator.normal(size=total).astype(np.float32)),
            "behaviour_logprobs": tokens.like(np.full(total, -4.0, dtype=np.float32)),
            "group": np.repeat(np.arange(groups), size),
        },
    )


def padded_loop(directory: str) -> Callable[[Batch], None]:
    """The same mini-batch with transformers, padded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95))

    def train(batch: Batch) -> None:
        tokens, mask, advantages, behaviour, present = (
            torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in column], batch_first=True)
            for column in (
                *(batch.ragged(n) for n in ("tokens", "loss_mask", "advantages", "behaviour_logprobs")),
                Ragged.from_arrays([np.ones(n, dtype=np.int64) for n in batch.ragged("tokens").lengths]),
            )
        )
        ids = tokens.long()
        logits = model(input_ids=ids, attention_mask=present).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (logprobs - behaviour[:, 1:]).exp()
        advantage = advantages[:, 1:]
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        ((loss * mask[:, 1:]).sum() / 1000.0).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return train


def packed_loop(engine: TorchTrainingEngine) -> Callable[[Batch], None]:
    """A mini-batch with the engine."""
    spec = LossSpec(function="benchmark_losses:clipped", columns=("advantages", "behaviour_logprobs"))

    def train(batch: Batch) -> None:
        step = engine.begin_step(spec)
        step.accumulate(batch)
        step.finish(denominator=1000.0)

    return train


def rates(work: Callable[[Batch], object], batches: Sequence[Batch], *, parts: int) -> list[float]:
    """Loss-mask tokens per CPU second, for each batch, in ``parts`` equal parts; the first batch warms up."""
    found = []
    for batch in (batches[0], *batches):
        split = [batch.take(rows) for rows in np.split(np.arange(len(batch)), parts)]
        started = time.process_time()
        for part in split:
            work(part)
        found.append(int(batch.ragged("loss_mask").values.sum()) / (time.process_time() - started))
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--error", type=float, default=0.1, help="share of wrong symbols, so of answers that differ")
    parser.add_argument("--batches", type=int, default=10)
    options = parser.parse_args()
    module = ModuleType("benchmark_losses")
    module.clipped = clipped  # type: ignore[attr-defined]  # a module made at run time
    sys.modules[module.__name__] = module
    generator = np.random.default_rng(0)
    batches = [
        make_batch(generator, groups=256 // options.group_size, size=options.group_size, error=options.error)
        for _ in range(options.batches)
    ]
    lengths = np.concatenate([batch.ragged("tokens").lengths for batch in batches])
    print(f"rows of {lengths.mean():.1f} tokens, longest {lengths.max()}; tokens of the loss mask per CPU second:")
    engine = TorchTrainingEngine(TorchTrainingSettings(optimizer=options.optimizer, dtype=options.dtype))
    with tempfile.TemporaryDirectory() as directory:
        engine.create_model(directory, settings=MODEL, seed=0)
        engine.start(TrainingContext(name="trainer", model_path=directory, seed=0, threads=1, total_steps=100))
        measured = {
            "packed training": rates(packed_loop(engine), batches, parts=4),
            "packed forward": rates(engine.forward, batches, parts=1),
            "padded training": rates(padded_loop(directory), batches, parts=4),
        }
    for name, values in measured.items():
        print(f"{name}: median {np.median(values):.0f}, best {max(values):.0f}")


if __name__ == "__main__":
    main()
