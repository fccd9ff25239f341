"""Trains with TRL's GRPOTrainer and writes a line of JSON for each step: reward, wall seconds, CPU-seconds.

    PYTHON benchmarks/trl_peer.py --model FOLDER --train FILE.parquet --steps 20 --output steps.jsonl

benchmarks/against_trl.py runs this program with the Python of an environment that contains TRL, so the program imports nothing of
mrl. The measured times do not include start-up. The reward is 1 if the last number of the response is the ground truth.
"""

import argparse
import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[Any], reward_model: list[dict[str, str]], **unused: Any) -> list[float]:
    """Return 1 for each response whose last number is the ground truth, else 0."""
    numbers = [re.findall(r"-?\d+", messages[0]["content"]) for messages in completions]
    truths = [float(row["ground_truth"]) for row in reward_model]
    return [float(bool(found) and float(found[-1]) == truth) for found, truth in zip(numbers, truths, strict=True)]


def cpu_seconds() -> float:
    """Return the CPU-seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Recorder(TrainerCallback):
    """Writes a line for each step. Ends the training when the mean reward of the last five steps reaches a goal."""

    def __init__(self, path: Path, stop_reward: float | None) -> None:
        self.file, self.stop_reward, self.rewards = path.open("w"), stop_reward, []

    def on_train_begin(self, *unused: Any, **also_unused: Any) -> None:
        self.start = self.last = (time.perf_counter(), cpu_seconds())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **unused: Any) -> None:
        if not logs or "reward" not in logs:
            return
        now = (time.perf_counter(), cpu_seconds())
        numbers = dict(reward=logs["reward"], wall=now[0] - self.last[0])
        numbers |= dict(cum_wall=now[0] - self.start[0], cum_cpu=now[1] - self.start[1])
        self.last = now
        self.file.write(json.dumps(numbers) + "\n")
        self.file.flush()
        self.rewards.append(logs["reward"])
        if self.stop_reward and len(self.rewards) >= 5 and sum(self.rewards[-5:]) / 5 >= self.stop_reward:
            control.should_training_stop = True


def config_of(args: argparse.Namespace) -> GRPOConfig:
    """Return TRL's settings for the same training as mrl's: one optimizer step for each batch, no KL penalty, float32."""
    batch = args.prompts * args.responses
    return GRPOConfig(
        output_dir=str(args.output.with_suffix(".trl")),
        seed=args.seed,
        use_cpu=True,
        bf16=False,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        per_device_train_batch_size=batch,
        num_generations=args.responses,
        max_completion_length=args.max_response_tokens,
        max_steps=args.steps,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="dapo",
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "train", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("prompts", "responses", "max-response-tokens", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--stop-reward", type=float)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=reward,
        args=config_of(args),
        train_dataset=Dataset.from_parquet(str(args.train), cache_dir=str(args.output.with_suffix(".cache"))),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[Recorder(args.output, args.stop_reward)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
