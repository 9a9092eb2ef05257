"""A reward model is asked about the tokens it learned from, whatever writes their special tokens."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from example_helpers import finish, settings
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from cavesson.data.prompts import load_prompts
from cavesson.data.settings import PromptSettings
from cavesson.errors import UserError
from cavesson.models.tiny import tiny_tokenizer
from cavesson.rollout.rewards.classifier import ClassifierReward
from cavesson.rollout.rewards.pipeline import PipelineReward
from cavesson.tools.score import score
from cavesson.tools.settings import ScoreSettings

ROWS = [
    {"prompt": "On the table", "chosen": " lay a letter.", "rejected": " X"},
    {"prompt": "My", "chosen": " dog sleeps", "rejected": " DOG"},
]
BODY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # noqa: E501
TEMPLATES = {"plain": None, "no BOS": BODY, "BOS": "{{ bos_token }}" + BODY}
WRITTEN = {"nothing": "$A", "BOS": "<|begin|> $A", "EOS": "$A <|endoftext|>", "both": "<|begin|> $A <|endoftext|>"}


def start(folder: Path, written: str) -> PreTrainedTokenizerBase:
    """A model whose tokenizer writes these special tokens around every text."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    ids = [("<|begin|>", tokenizer.bos_token_id), ("<|endoftext|>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=written, special_tokens=ids)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=1, initializer_range=0.5, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer  # type: ignore[no-any-return]


def trained(folder: Path, template: str | None, written: str) -> tuple[Path, list[float], list[Any]]:
    """A run's folder, its rewards of the very ids it learned from, and the prompts as a policy's run writes them."""
    tokenizer = start(folder / "start", written)
    chat: dict[str, Any] = {} if template is None else {"data__chat": True, "data__template": template}
    changes = {"model__path": str(folder / "start"), "steps": 1, "batch_size": 2, **chat}
    examples = settings("reward-model", folder, ROWS, **changes).examples(tokenizer)
    batch = examples.collate(examples.train.take(0, len(ROWS)))
    finish("reward-model", folder, ROWS, **changes)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "run" / "model").eval()
    with torch.no_grad():
        expected = [
            float(model(batch[f"{side}_ids"][row : row + 1, : batch[f"{side}_length"][row]]).logits)
            for row in range(len(ROWS))
            for side in ("chosen", "rejected")
        ]
    data = PromptSettings(path=str(folder / "rows.jsonl"), chat=template is not None, template=template, shuffle=False)
    return folder / "run", expected, list(load_prompts(data, tokenizer).texts)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("template", "written"), list(product(TEMPLATES, WRITTEN)))
def test_a_reward_is_that_of_the_tokens_that_were_learned(template: str, written: str, tmp_path: Path) -> None:
    run, expected, prompts = trained(tmp_path, TEMPLATES[template], WRITTEN[written])
    assert len({round(reward, 3) for reward in expected}) == 4
    twice = [prompt for prompt in prompts for _ in range(2)]
    responses = [row[side] for row in ROWS for side in ("chosen", "rejected")]
    assert ClassifierReward(str(run), batch_size=3)(twice, responses) == pytest.approx(expected, abs=1e-4)
    # As what a file holds: texts whose special tokens are control tokens because the caller says so.
    reward = ClassifierReward(str(run / "model"), special_tokens="control")
    assert reward([str(prompt) for prompt in twice], responses) == pytest.approx(expected, abs=1e-4)


def test_a_file_is_scored_as_the_model_learned(tmp_path: Path) -> None:
    run, expected, prompts = trained(tmp_path, TEMPLATES["no BOS"], WRITTEN["both"])
    rows = [{"prompt": str(prompts[n]), "response": [row["chosen"], row["rejected"]]} for n, row in enumerate(ROWS)]
    file = tmp_path / "said.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = score(str(file), ScoreSettings(rewards=str(run), special_tokens="control", device="cpu"))
    (interval,) = summary.rewards.values()
    assert interval.mean == pytest.approx(sum(expected) / 4, abs=1e-4)


def test_a_pipeline_that_would_add_a_start_token_is_refused(tmp_path: Path) -> None:
    run, _, _ = trained(tmp_path, TEMPLATES["no BOS"], WRITTEN["BOS"])
    with pytest.raises(UserError, match=r'trained on texts without the start token.*use = "classifier"'):
        PipelineReward(str(run), label="LABEL_0")
