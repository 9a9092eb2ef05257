"""Policy, critic and reference over as few weights as possible."""

import json

import pytest
import torch
from models_helpers import batch, gradients, policy_of, scramble, sharp_model
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config, LlamaConfig

from cavesson.errors import UserError
from cavesson.models.load import prepare
from cavesson.models.parts import trunk
from cavesson.models.policy import Policy
from cavesson.models.settings import LoraSettings, ReferenceSettings, ValueSettings
from cavesson.models.tiny import tiny_model

AUTO = ReferenceSettings()
LORA = LoraSettings(rank=4)
SMALL = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 1,
}
FULL_AND_LORA = pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])


@FULL_AND_LORA
@pytest.mark.parametrize("kind", ["auto", "copy"])
def test_at_the_start_policy_and_reference_are_equal_bit_for_bit(lora, kind):
    policy = policy_of(lora=lora, reference=ReferenceSettings(kind=kind), temperature=0.7)
    logprob = policy(batch()).logprob
    assert logprob.abs().max() > 1
    assert torch.equal(logprob, policy.reference_logprob(batch()))
    assert policy.reference_kl(batch()).abs().max() == 0


@FULL_AND_LORA
@pytest.mark.parametrize("kind", ["auto", "copy"])
def test_the_reference_stays_where_it_was(lora, kind):
    policy = policy_of(lora=lora, reference=ReferenceSettings(kind=kind))
    before = policy.reference_logprob(batch())
    scramble(policy)
    assert torch.equal(policy.reference_logprob(batch()), before)
    assert (policy(batch()).logprob - before).abs().max() > 0.01


def test_a_critic_in_bfloat16_reads_positions_as_its_policy_does():
    model = sharp_model(dtype=torch.bfloat16)
    policy = policy_of(model, value=ValueSettings(kind="separate"), dtype="bfloat16")
    ids = torch.arange(2, 202)[None]
    with torch.no_grad():
        states = [module(input_ids=ids).last_hidden_state for module in (policy.critic, trunk(policy.model))]
    assert torch.equal(*states)


@pytest.mark.parametrize(("dora", "expected"), [(False, torch.bfloat16), (True, torch.float32)], ids=["lora", "dora"])
def test_adapters_of_a_model_in_bfloat16(dora, expected):
    """DoRA's are in float32, because it divides by norms of whole weights."""
    policy = policy_of(sharp_model(dtype=torch.bfloat16), lora=LoraSettings(rank=4, dora=dora), dtype="bfloat16")
    assert {p.dtype for p in policy.model.parameters() if p.requires_grad} == {expected}


def test_adapters_off_holds_one_model_only():
    policy = policy_of(lora=LORA, reference=AUTO)
    assert policy._reference == ("adapters-off",)
    # and the adapters are on again afterwards
    scramble(policy)
    before = policy(batch()).logprob
    policy.reference_logprob(batch())
    assert torch.equal(policy(batch()).logprob, before)


def test_a_frozen_reference_is_no_part_of_what_learns_or_is_saved():
    with_reference, without = policy_of(reference=AUTO), policy_of()
    assert set(with_reference.state_dict()) == set(without.state_dict())
    assert not any(parameter.requires_grad for parameter in with_reference.frozen_reference.parameters())


def test_another_model_as_reference(tmp_path):
    sharp_model(seed=5).save_pretrained(tmp_path)
    policy = policy_of(reference=ReferenceSettings(kind="model", path=str(tmp_path)))
    expected = policy_of(sharp_model(seed=5))(batch()).logprob
    torch.testing.assert_close(policy.reference_logprob(batch()), expected.detach(), atol=1e-6, rtol=0)


def test_without_a_reference_there_is_none_to_ask():
    with pytest.raises(ValueError, match="no reference"):
        policy_of().reference_logprob(batch())


def test_an_untrained_critic_predicts_nothing():
    for kind in ("trunk", "separate"):
        assert policy_of(value=ValueSettings(kind=kind))(batch()).value.abs().max() == 0
    assert policy_of()(batch()).value is None


def test_a_critic_on_the_trunk_shares_its_weights():
    policy = policy_of(value=ValueSettings())
    scramble(policy.value_head, std=1.0)
    policy(batch()).value.sum().backward()
    assert gradients(policy.model)
    assert sum(p.numel() for p in policy.parameters()) == sum(p.numel() for p in policy.model.parameters()) + 97


def test_a_separate_critic_shares_nothing():
    policy = policy_of(value=ValueSettings(kind="separate"), reference=AUTO)
    scramble(policy.value_head, std=1.0)
    before = policy(batch()).value
    assert before.abs().max() > 0.1
    before.sum().backward()
    assert not gradients(policy.model)
    assert gradients(policy.critic)
    scramble(policy.model)
    assert torch.equal(policy(batch()).value, before)
    scramble(policy.critic)
    assert not torch.equal(policy(batch()).value, before)


@FULL_AND_LORA
def test_a_separate_critic_starts_from_the_policy_and_learns_whole(lora):
    policy = policy_of(lora=lora, value=ValueSettings(kind="separate"))
    scramble(policy.value_head, std=1.0)
    shared = policy_of(value=ValueSettings())
    shared.value_head.load_state_dict(policy.value_head.state_dict())
    assert torch.equal(policy(batch()).value, shared(batch()).value)
    assert all(parameter.requires_grad for parameter in policy.critic.parameters())


def test_a_separate_critic_from_another_model(tmp_path):
    other = sharp_model(seed=5)
    other.save_pretrained(tmp_path)
    policy = policy_of(value=ValueSettings(kind="separate", path=str(tmp_path)))
    for name, weight in trunk(other).state_dict().items():
        assert torch.equal(policy.critic.state_dict()[name], weight)


def test_adapters_learn_and_the_base_does_not():
    policy = policy_of(lora=LORA, value=ValueSettings(), reference=AUTO)
    learning = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert {"value_head.weight", "value_head.bias"} < learning
    assert all("lora_" in name for name in learning if not name.startswith("value_head"))
    # Seven linear layers in each of two blocks, two matrices each; the head gets no adapter.
    assert len(learning) == 2 + 2 * 7 * 2
    assert not any("lm_head" in name for name in learning)


def test_adapters_at_named_layers_only():
    policy = policy_of(lora=LoraSettings(rank=2, targets=("q_proj",)))
    learning = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert len(learning) == 2 * 2
    assert all("q_proj" in name for name in learning)


def test_adapters_are_scaled_by_alpha_over_rank():
    policy = policy_of(lora=LoraSettings(rank=4, alpha=12, targets=("q_proj",)))
    scramble(policy, std=0.5)
    layer = policy.model.get_base_model().model.layers[0].self_attn.q_proj
    x = torch.randn(3, 96)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = x @ (layer.base_layer.weight + 12 / 4 * b @ a).t()
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)


@FULL_AND_LORA
def test_gradient_checkpointing_gives_the_same_gradients(lora):
    outer = torch.randn(4, 4)
    seen, calls = [], []
    for checkpointing in (False, True):
        torch.manual_seed(2)
        policy = policy_of(lora=lora, value=ValueSettings(), gradient_checkpointing=checkpointing)
        scramble(policy)
        count = []
        layer = next(m for name, m in policy.named_modules() if name.endswith("layers.0.mlp"))
        layer.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        scores = policy(batch())
        (outer * (scores.logprob + scores.value)).sum().backward()
        seen.append(gradients(policy))
        calls.append(len(count))
    assert calls == [1, 2]  # computed again in the backward pass
    assert seen[0].keys() == seen[1].keys()
    torch.testing.assert_close(seen[1], seen[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=258, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
        LlamaConfig(**SMALL, attention_dropout=0.5),
    ],
    ids=["in modules", "in numbers"],
)
def test_scores_do_not_depend_on_dropout(config):
    model = prepare(AutoModelForCausalLM.from_config(config))
    policy = policy_of(model, gradient_checkpointing=True, reference=AUTO)
    assert torch.equal(policy(batch()).logprob, policy.reference_logprob(batch()))
    assert not any(module.training for module in policy.modules())


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"reference": ReferenceSettings(kind="adapters-off")}, '"adapters-off" needs model.lora'),
        ({"lora": LoraSettings(targets=("no_such_layer",))}, "model.lora.targets ['no_such_layer']"),
        ({"lora": LoraSettings(targets=("q_proj", "lm_head"))}, "include the output head"),
        (
            {"lora": LoraSettings(targets=("q_proj", "embed_tokens"))},
            "include the input embedding, which is the output",
        ),
    ],
)
def test_contradictions_are_explained(settings, part):
    with pytest.raises(UserError) as error:
        policy_of(**settings)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_an_embedding_that_is_not_the_head_can_have_an_adapter(tmp_path):
    model = prepare(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=False)))
    policy = policy_of(model, lora=LoraSettings(targets=("q_proj", "embed_tokens")))
    assert any("embed_tokens.lora" in name for name, _ in policy.named_parameters())


def test_quantized_weights_are_not_trained_without_adapters():
    """Those of a checkpoint that was saved with fewer bits are not known from the settings."""

    def quantized():
        model = sharp_model()
        model.hf_quantizer = object()  # as transformers leaves it
        return model

    with pytest.raises(UserError, match=r"has quantized weights, which cannot be trained; add model\.lora"):
        policy_of(quantized())
    with pytest.raises(UserError, match=r"critic's start .* has quantized weights"):
        policy_of(quantized(), value=ValueSettings(kind="separate"))


def test_a_reference_whose_head_is_not_known_is_refused():
    config = BertConfig(**SMALL, is_decoder=True)  # a layer stands before its head
    with pytest.raises(UserError, match="bert changes its logits"):
        Policy(sharp_model(), reference=prepare(AutoModelForCausalLM.from_config(config)))


def test_models_that_do_not_fit_are_refused(tmp_path):
    narrow = tiny_model(hidden=32)
    narrow.resize_token_embeddings(300)
    narrow.save_pretrained(tmp_path / "wide")
    with pytest.raises(UserError, match="a different vocabulary"):
        policy_of(reference=ReferenceSettings(kind="model", path=str(tmp_path / "wide")))
    with pytest.raises(UserError, match=r"the critic .* has a different vocabulary"):
        policy_of(value=ValueSettings(kind="separate", path=str(tmp_path / "wide")))


def test_tokenizers_decide_whether_vocabularies_are_the_same(tmp_path, tokenizer):
    """Qwen 2.5 has 151,936 embeddings in its 3B and 152,064 in its 7B model, and one tokenizer."""
    wide = tiny_model(hidden=32)
    wide.resize_token_embeddings(300)
    wide.save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    path = str(tmp_path / "wide")
    policy = policy_of(reference=ReferenceSettings(path=path), value=ValueSettings(path=path))
    assert policy.reference_logprob(batch()).shape == policy(batch()).logprob.shape
    content = json.loads((tmp_path / "wide" / "tokenizer.json").read_text())
    first, second = list(content["model"]["vocab"])[-2:]
    content["model"]["vocab"] |= {first: content["model"]["vocab"][second], second: content["model"]["vocab"][first]}
    tiny_model(hidden=32).save_pretrained(tmp_path / "other")  # as many tokens as the policy
    tokenizer.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"the reference .* has a different vocabulary"):
        policy_of(reference=ReferenceSettings(path=str(tmp_path / "other")))
    wide.resize_token_embeddings(200)  # the tokenizer names tokens that have no embedding here
    wide.save_pretrained(tmp_path / "wide")
    with pytest.raises(UserError, match=r"the critic .* has a different vocabulary"):
        policy_of(value=ValueSettings(path=path))
