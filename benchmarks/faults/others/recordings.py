"""The two recordings that users of TRL have besides ours: RL Logging Board's lines, and TRL's tables of completions.

Both are written from the trainer's own local variables, independently of Cavesson's recorder.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.faults.others.plan import Plan

PPO_COLUMNS = {"prompt": "query", "response": "model response", "reward": "score"}
"""The record's column → that of the table which TRL's PPO shows."""


def record_board(plan: Plan, folder: Path) -> None:
    """Write one JSON line per response, as users of RL Logging Board do from inside the training loop."""
    folder.mkdir(parents=True)
    path = folder / "rollouts.jsonl"

    def tap(variables: dict[str, Any]) -> None:
        lines = (_ppo_lines if plan.trainer == "ppo" else _grouped_lines)(variables)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    if plan.trainer == "ppo":
        where, loop = "train", "range(args.num_ppo_epochs)"
        plan.replace(where, f"for ppo_epoch_idx in {loop}", f"for ppo_epoch_idx in tap(locals()) or {loop}", tap=tap)
    else:
        copied = "all_process_advantages = advantages.clone()"
        plan.replace("_generate_and_score_completions", copied, f"tap(locals()); {copied}", tap=tap)


def record_completions(plan: Plan, folder: Path) -> None:
    """Write the table of completions of each step as Parquet files.

    GRPO writes them itself. PPO and RLOO hand the same table to a tracker only; it is caught on its way there.
    """
    folder.mkdir(parents=True)
    if plan.trainer == "grpo":
        return

    def table(columns: dict[str, Any]) -> pd.DataFrame:
        found = pd.DataFrame(columns)
        step = plan.object.state.global_step
        numbered = found if "step" in found else found.assign(step=step)
        numbered.to_parquet(folder / f"completions_{step:05d}.parquet")
        return found

    where = "generate_completions" if plan.trainer == "ppo" else "log"
    plan.replace(where, "pd.DataFrame(table)", "keep_table(table)", keep_table=table)


def _ppo_lines(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of a step of PPO.

    Values and token rewards go one token further than the response where it ended early: there TRL 1.10 puts the score.
    """
    tokenizer = found["processing_class"]
    trained = (~found["padding_mask"]).sum(1).tolist()
    scored = (~found["padding_mask_p1"]).sum(1).tolist()
    lines = []
    for row, (count, further) in enumerate(zip(trained, scored, strict=True)):
        ids = found["responses"][row]
        lines.append(
            {
                "step": found["update"] - 1,
                "prompt": tokenizer.decode(found["queries"][row], skip_special_tokens=True),
                "response": tokenizer.decode(found["postprocessed_responses"][row], skip_special_tokens=True),
                "response_tokens": [tokenizer.decode([i]) for i in ids[:further].tolist()],
                "logprobs": found["logprobs"][row, :count].tolist(),
                "ref_logprobs": found["ref_logprobs"][row, :count].tolist(),
                "values": found["values"][row, :further].tolist(),
                "token_rewards": found["rewards"][row, :further].tolist(),
                "reward": found["scores"][row].item(),
            }
        )
    return lines


def _grouped_lines(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of a step of GRPO or RLOO."""
    trainer, mask = found["self"], found["completion_mask"].bool()
    logprobs, reference = found["old_per_token_logps"], found["ref_per_token_logps"]
    if logprobs is None:  # GRPO computes them with the loss
        with torch.no_grad():
            logprobs = type(trainer)._get_per_token_logps_and_entropies(
                trainer, trainer.model, found["prompt_completion_ids"], found["attention_mask"], mask.shape[1]
            )[0]
    rewards = (found["rewards_per_func"] * trainer.reward_weights).nansum(1).tolist()
    lines = []
    for row, (prompt, response) in enumerate(zip(found["prompts"], found["completions"], strict=True)):
        here = mask[row]
        line = {
            "step": trainer.state.global_step,
            "prompt": prompt,
            "response": response,
            "response_tokens": [trainer.processing_class.decode([i]) for i in found["completion_ids"][row, here]],
            "logprobs": logprobs[row, here].tolist(),
            "reward": rewards[row],
        }
        lines.append(line if reference is None else line | {"ref_logprobs": reference[row, here].tolist()})
    return lines
