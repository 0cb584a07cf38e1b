"""TRL's GRPOTrainer on the demo's task; started by ``end_to_end.py`` in an interpreter that has ``trl``.

    python tests/benchmarks/trl_grpo.py SPEC.json RESULT.json

One batch is what it is in the demo: ``groups`` prompts x ``group_size`` answers generated at once, then
``mini_batches`` optimiser steps, whose loss is the mean over the step's tokens. It imports nothing of headrace.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class ExactAnswer:
    """1 for the answer's tokens and the end, else 0; remembers the mean and the tokens of every batch."""

    __name__ = "exact"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.means: list[float] = []
        self.tokens: list[int] = []

    def __call__(self, *, completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        end = self._tokenizer.eos_token_id
        wanted = [[*self._tokenizer.encode(text, add_special_tokens=False), end] for text in answer]
        rewards = [float(list(got) == right) for got, right in zip(completion_ids, wanted, strict=True)]
        self.means.append(sum(rewards) / len(rewards))
        self.tokens.append(sum(map(len, completion_ids)))
        return rewards


class BatchClock(TrainerCallback):
    """Wall and CPU seconds of this process at the end of every batch's last optimiser step."""

    def __init__(self, mini_batches: int) -> None:
        self._mini_batches = mini_batches
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._mini_batches == 0:
            self.wall.append(time.monotonic())
            self.cpu.append(time.process_time())


def configuration(spec: dict[str, Any], directory: str) -> GRPOConfig:
    """The demo's settings in TRL's words; what has no counterpart is switched off."""
    return GRPOConfig(
        output_dir=directory,
        seed=spec["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=spec["groups"] * spec["group_size"] // spec["mini_batches"],
        gradient_accumulation_steps=1,
        steps_per_generation=spec["mini_batches"],
        num_generations=spec["group_size"],
        max_steps=spec["batches"] * spec["mini_batches"],
        shuffle_dataset=False,
        max_completion_length=spec["max_new_tokens"],
        temperature=spec["temperature"],
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=spec["betas"][0],
        adam_beta2=spec["betas"][1],
        adam_epsilon=spec["eps"],
        weight_decay=spec["weight_decay"],
        max_grad_norm=spec["max_gradient_norm"],
        beta=0.0,
        epsilon=spec["clip_low"],
        epsilon_high=spec["clip_high"],
        loss_type="bnpo",  # the mean over all tokens of one optimiser step
        scale_rewards="group",
    )


def main() -> int:
    """Train; write seconds, rewards and tokens per batch."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    reward, clock = ExactAnswer(tokenizer), BatchClock(spec["mini_batches"])
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
            args=configuration(spec, directory),
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(spec["tasks"]),
            callbacks=[clock],
        )
        trainer.train()
    result = {"wall": clock.wall, "cpu": clock.cpu, "rewards": reward.means, "tokens": reward.tokens}
    Path(sys.argv[2]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
