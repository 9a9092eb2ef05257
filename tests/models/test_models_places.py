"""What references and critics are made of: whatever `model.path` takes, and reward models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models_helpers import batch, policy_of, scramble, sharp_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification, PreTrainedModel

from cavesson.config import check
from cavesson.errors import UserError
from cavesson.models.parts import trunk
from cavesson.models.settings import LoraSettings, ModelSettings, ReferenceSettings, ValueSettings
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.models.trained import save_trained
from cavesson.registry import ALGORITHMS
from cavesson.train.run import Training


def whole(folder: Path) -> PreTrainedModel:
    """A folder of another model than the policy's."""
    model = sharp_model(seed=5)
    save_trained(folder, model, tiny_tokenizer(), ModelSettings())
    return model


def run_folder(folder: Path) -> PreTrainedModel:
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    return whole(folder / "model")


def adapter(folder: Path) -> PreTrainedModel:
    """A folder of an adapter, as PEFT writes it, beside the folder of its base; returns the two merged."""
    base = folder.with_name("base")
    whole(base)
    model: Any = get_peft_model(sharp_model(seed=5), LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    scramble(model, 0.3)
    save_trained(folder, model, tiny_tokenizer(), ModelSettings(path=str(base), lora=LoraSettings()))
    return model.merge_and_unload()  # type: ignore[no-any-return]


def reward_model(folder: Path, outputs: int = 1) -> LlamaForSequenceClassification:
    """A reward model with a head that is not 0."""
    config = tiny_model(seed=5).config
    config.num_labels, config.pad_token_id = outputs, 1
    model: Any = LlamaForSequenceClassification(config)
    scramble(model, 0.3)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model.eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [whole, run_folder, adapter])
def test_a_reference_is_whatever_a_model_may_be(make: Any, tmp_path: Path) -> None:
    other = make(tmp_path / "other")
    policy = policy_of(reference=ReferenceSettings(path=str(tmp_path / "other")))
    expected = policy_of(other)(batch()).logprob
    torch.testing.assert_close(policy.reference_logprob(batch()), expected.detach(), atol=1e-5, rtol=0)
    assert (policy(batch()).logprob - expected).abs().max() > 0.1


@pytest.mark.parametrize("make", [whole, run_folder, adapter])
def test_a_critic_starts_from_whatever_a_model_may_be(make: Any, tmp_path: Path) -> None:
    other = make(tmp_path / "other")
    policy = policy_of(value=ValueSettings(path=str(tmp_path / "other")))
    assert policy.critic is not None
    for name, weight in trunk(other).state_dict().items():
        torch.testing.assert_close(policy.critic.state_dict()[name], weight)
    assert all(parameter.requires_grad for parameter in policy.critic.parameters())
    assert policy(batch()).value.abs().max() == 0


@pytest.mark.parametrize("name", ["folder", "run"])
def test_the_first_values_of_a_critic_from_a_reward_model_are_its_rewards(name: str, tmp_path: Path) -> None:
    place = tmp_path / "folder"
    if name == "run":
        place = tmp_path / "run" / "model"
        place.parent.mkdir()
        (place.parent / "run.json").write_text("{}")
    reward_model(place)
    path = place if name == "folder" else place.parent
    model = AutoModelForSequenceClassification.from_pretrained(place).eval()
    prompt, response = [20, 21, 22, 23], [60, 61, 62, 63]
    value = policy_of(value=ValueSettings(path=str(path)))(batch([prompt], [response])).value[0]
    # The value before a token is the reward of what stands before it.
    seen = [prompt + response[:count] for count in range(len(response))]
    with torch.no_grad():
        rewards = torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in seen])
    assert rewards.std() > 0.01
    torch.testing.assert_close(value, rewards, atol=1e-5, rtol=1e-5)


def test_a_critic_may_be_of_another_size_than_the_policy(tmp_path: Path) -> None:
    tiny_model(hidden=32).save_pretrained(tmp_path)
    policy = policy_of(value=ValueSettings(path=str(tmp_path)))
    assert policy.value_head.in_features == 32
    assert policy(batch()).value.shape == policy(batch()).logprob.shape


def test_a_critic_that_cannot_give_a_value_is_refused(tmp_path: Path) -> None:
    reward_model(tmp_path / "two", outputs=2)
    with pytest.raises(UserError, match="has 2 outputs; a reward model has one"):
        policy_of(value=ValueSettings(path=str(tmp_path / "two")))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ppo", {"reference": {"path": "./nowhere"}}, "reference.path: there is no model folder ./nowhere"),
        ("grpo", {"reference": {"path": "./nowhere"}}, "reference.path: there is no model folder ./nowhere"),
        ("rloo", {"reference": {"path": "./nowhere"}}, "reference.path: there is no model folder ./nowhere"),
        ("raft", {"reference": {"path": "./nowhere"}}, "reference.path: there is no model folder ./nowhere"),
        ("dpo", {"reference": {"path": "./nowhere"}}, "reference.path: there is no model folder ./nowhere"),
        ("ppo", {"value": {"path": "./nowhere"}}, "value.path: there is no model folder ./nowhere"),
        ("ppo", {"model": {"path": "./nowhere"}}, "model.path: there is no model folder ./nowhere"),
        ("sft", {"model": {"path": "./nowhere"}}, "model.path: there is no model folder ./nowhere"),
        ("ppo", {"value": {"path": ".", "gguf_file": "a.gguf"}}, "value.path: there is no file a.gguf in "),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_before_anything_is_read_or_written(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The data is not there either: the path is looked at first.
    settings = check(ALGORITHMS[name].settings, {"run": "run", "data": {"path": "no.jsonl"}, **changes}, "the test")
    with pytest.raises(UserError) as error:
        Training(settings)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_a_critic_from_a_reward_model_and_a_run_as_reference(tmp_path: Path) -> None:
    reward_model(tmp_path / "rewards")
    run_folder(tmp_path / "before")
    changes = {
        "run": tmp_path / "run", "steps": 1, "batch_size": 4, "sampling": {"max_new_tokens": 3},
        "value": {"path": str(tmp_path / "rewards")}, "reference": {"path": str(tmp_path / "before")},
        "model": {"device": "cpu"},
    }  # fmt: skip
    settings = check(ALGORITHMS["ppo"].settings, changes, "the test")
    training = Training(
        settings, prompts=["On the table"], rewards=lambda prompts, responses, **_: [0.0] * len(prompts)
    )
    (metrics,) = training.run(lambda *_: None).metrics
    assert metrics["kl/objective"] > 1
    assert metrics["value/mean"] != 0
