"""Rewards that are models, against the logits of these models scored one by one and without padding."""

import copy
import threading

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    RobertaConfig,
)

from cavesson.data.special_tokens import Written
from cavesson.errors import UserError
from cavesson.models.classifier import ADDS_START
from cavesson.models.tiny import tiny_model
from cavesson.ops.linear import tf32
from cavesson.rollout.rewards.classifier import ClassifierReward
from cavesson.rollout.rewards.pipeline import PipelineReward
from cavesson.rollout.rewards.settings import RewardSettings
from cavesson.rollout.rewards.table import build_rewards

PROMPTS = ["p ", "a longer prompt, ", "r"]
RESPONSES = ["a", "with quite a long response, too", ""]
LABELS = {"num_labels": 3, "id2label": {0: "NEG", 1: "MID", 2: "POS"}, "label2id": {"NEG": 0, "MID": 1, "POS": 2}}


TINY = {"vocab_size": 258, "pad_token_id": 1, "initializer_range": 0.5, **LABELS, "hidden_size": 16}
TINY |= {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def build(kind: str) -> PreTrainedModel:
    shared = {"vocab_size": 258, "pad_token_id": 1, "initializer_range": 0.5}
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForSequenceClassification(LlamaConfig(**shared, **sizes, num_labels=1))
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
        return GPT2ForSequenceClassification(GPT2Config(**shared, **sizes, num_labels=1))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**shared, **sizes, max_position_embeddings=64, **LABELS))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    """A folder for each kind; the tokenizers pad on the left, as those of many language models do."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("classifiers")
    for kind in ("llama", "gpt2", "bert"):
        build(kind).save_pretrained(root / kind)
    tiny_model().save_pretrained(root / "lm")
    for folder in root.iterdir():
        tokenizer.save_pretrained(folder)
        config = folder / "tokenizer_config.json"
        config.write_text(config.read_text().replace("{", '{"padding_side": "left", ', 1))
    return root


def logits(folder, tokenizer, kind: str):
    classes = {"llama": LlamaForSequenceClassification, "gpt2": GPT2ForSequenceClassification}
    model = classes.get(kind, BertForSequenceClassification).from_pretrained(folder / kind).eval()
    model.config.pad_token_id = None
    texts = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    with torch.no_grad():
        return torch.cat([model(torch.tensor([tokenizer(text)["input_ids"]])).logits for text in texts])


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_classifier_s_logit(folders, tokenizer, kind, batch_size):
    label = 2 if kind == "bert" else 0
    reward = ClassifierReward(str(folders / kind), label=2 if kind == "bert" else None, batch_size=batch_size)
    expected = logits(folders, tokenizer, kind)[:, label].tolist()
    assert len({round(x, 3) for x in expected}) == 3
    assert reward(PROMPTS, RESPONSES) == pytest.approx(expected, abs=1e-5)


def test_a_pad_token_without_an_embedding_is_refused(folders, tokenizer, tmp_path):
    build("llama").save_pretrained(tmp_path)
    added = copy.deepcopy(tokenizer)
    added.add_special_tokens({"pad_token": "[PAD]"})
    added.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="the pad token is token 258, but the model has embeddings for 258 tokens"):
        ClassifierReward(str(tmp_path))


@pytest.mark.parametrize("kind", ["classifier", "pipeline"])
@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (BertConfig(**TINY, max_position_embeddings=20), 20),
        # Positions of RoBERTa begin after its padding's, 1.
        (RobertaConfig(**TINY, max_position_embeddings=20), 18),
    ],
    ids=["bert", "roberta"],
)
def test_a_text_is_cut_at_the_model_s_positions_if_the_tokenizer_has_no_limit(tmp_path, tokenizer, kind, config, limit):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer.model_max_length > 10**9
    make = ClassifierReward if kind == "classifier" else PipelineReward
    reward = make(str(tmp_path), label="POS")
    ids = tokenizer("a" * 100)["input_ids"][:limit]
    with torch.no_grad():
        expected = float(model(torch.tensor([ids])).logits[0, 2])
    assert reward([""], ["a" * 100]) == pytest.approx([expected], abs=1e-5)


def test_a_probability_of_a_single_output_is_its_sigmoid(folders, tokenizer):
    expected = logits(folders, tokenizer, "llama").sigmoid()[:, 0].tolist()
    assert max(expected) < 0.999
    assert ClassifierReward(str(folders / "llama"), score="probability")(PROMPTS, RESPONSES) == pytest.approx(
        expected, abs=1e-5
    )


CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}"


def with_template(folder, tokenizer, ours=False):
    """A classifier whose tokenizer has a chat template."""
    model = build("llama")
    if ours:
        setattr(model.config, ADDS_START, None)
    model.save_pretrained(folder)
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = CHATML
    templated.save_pretrained(folder)
    return str(folder)


def score_of(folder, ids):
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits)


def test_conversations_are_read_as_the_classifier_s_own_template_writes_them(tmp_path, tokenizer):
    folder = with_template(tmp_path, tokenizer)
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "a<|endoftext|>"}]
    (end,) = tokenizer("<|endoftext|>")["input_ids"]
    spelled = [tokenizer(letter)["input_ids"][0] for letter in "<|endoftext|>"]  # what is said is no control token
    said = [tokenizer(text)["input_ids"] for text in ("[system]s", "[user]a", "[assistant]b")]
    expected = score_of(folder, [*said[0], end, *said[1], *spelled, end, *said[2], end])
    asked = {"prompts": ["the policy's text"], "responses": ["b"], "messages": [conversation]}
    assert ClassifierReward(folder)(**asked) == pytest.approx([expected], abs=1e-5)
    plain = score_of(folder, tokenizer("the policy's textb")["input_ids"])
    assert abs(plain - expected) > 1e-3
    assert ClassifierReward(folder, chat=False)(**asked) == pytest.approx([plain], abs=1e-5)
    ours = with_template(tmp_path / "ours", tokenizer, ours=True)
    plain = score_of(ours, tokenizer("the policy's textb")["input_ids"])
    assert ClassifierReward(ours)(**asked) == pytest.approx([plain], abs=1e-5)


def test_plain_prompts_are_turns_of_the_user_only_if_asked_for(tmp_path, tokenizer, caplog):
    folder = with_template(tmp_path, tokenizer)
    (end,) = tokenizer("<|endoftext|>")["input_ids"]
    said = [tokenizer(text)["input_ids"] for text in ("[user]a", "[assistant]b")]
    chat = score_of(folder, [*said[0], end, *said[1], end])
    assert ClassifierReward(folder, chat=True)(["a"], ["b"]) == pytest.approx([chat], abs=1e-5)
    assert not caplog.messages
    reward = ClassifierReward(folder)
    for _ in range(2):
        assert reward(["a"], ["b"]) == pytest.approx([score_of(folder, tokenizer("ab")["input_ids"])], abs=1e-5)
    (line,) = caplog.messages
    assert "has a chat template, which is not applied, because the prompts are plain texts" in line
    ClassifierReward(folder, chat=False)(["a"], ["b"])
    ClassifierReward(with_template(tmp_path / "ours", tokenizer, ours=True))(["a"], ["b"])
    assert len(caplog.messages) == 1


def test_chat_without_a_template_or_a_classifier_is_refused(folders):
    with pytest.raises(UserError, match="the classifier has no chat template"):
        ClassifierReward(str(folders / "llama"), chat=True)
    with pytest.raises(ValueError, match="only a classifier has a chat template"):
        RewardSettings(use="sentiment", chat=True)


def test_a_classifier_s_probability(folders, tokenizer):
    expected = logits(folders, tokenizer, "bert").softmax(-1)[:, 1].tolist()
    reward = ClassifierReward(str(folders / "bert"), label=1, score="probability")
    assert reward(PROMPTS, RESPONSES) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("label", "index"), [("NEG", 0), ("MID", 1), ("POS", 2)])
def test_a_classifier_s_output_by_name(folders, tokenizer, label, index):
    expected = logits(folders, tokenizer, "bert")[:, index].tolist()
    assert ClassifierReward(str(folders / "bert"), label=label)(PROMPTS, RESPONSES) == pytest.approx(expected, abs=1e-5)


def test_a_classifier_in_half_precision(folders, tokenizer):
    expected = logits(folders, tokenizer, "bert")[:, 0].tolist()
    reward = ClassifierReward(str(folders / "bert"), label=0, dtype="bfloat16")
    assert reward(PROMPTS, RESPONSES) == pytest.approx(expected, abs=0.2)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("apply", ["none", "softmax", "sigmoid"])
def test_a_pipeline_s_score(folders, tokenizer, batch_size, apply):
    raw = logits(folders, tokenizer, "bert")
    expected = {"none": raw, "softmax": raw.softmax(-1), "sigmoid": raw.sigmoid()}[apply][:, 2].tolist()
    reward = PipelineReward(str(folders / "bert"), label="POS", apply=apply, batch_size=batch_size)
    assert reward(PROMPTS, RESPONSES) == pytest.approx(expected, abs=1e-5)


def test_a_pipeline_with_absolute_positions(folders, tokenizer):
    reward = PipelineReward(str(folders / "gpt2"), label="LABEL_0", batch_size=3)
    assert reward(PROMPTS, RESPONSES) == pytest.approx(logits(folders, tokenizer, "gpt2")[:, 0].tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", ["classifier", "pipeline"])
def test_texts_that_are_cut_are_said_once(folders, kind, caplog):
    path = str(folders / "bert")
    reward = ClassifierReward(path, label="POS") if kind == "classifier" else PipelineReward(path, label="POS")
    reader = reward if kind == "classifier" else reward.pipe
    around = len(reader.tokenizer("")["input_ids"])
    fits, limit = "abc", 3 + around
    reward.longest = limit - around if kind == "classifier" else limit
    first = reward([""], [fits])
    assert not caplog.records
    assert [reward(["", ""], [fits, fits + "defg"]) for _ in range(2)] == [pytest.approx(first * 2, abs=1e-5)] * 2
    (said,) = caplog.messages
    assert path in said and "the rest has no effect" in said


@pytest.mark.parametrize("kind", ["classifier", "pipeline"])
def test_products_of_a_reward_are_not_computed_while_another_thread_uses_tf32(folders, kind):
    path, seen, scored = str(folders / "bert"), [], []
    reward = PipelineReward(path, label="POS") if kind == "pipeline" else ClassifierReward(path, label="POS")
    model = reward.pipe.model if isinstance(reward, PipelineReward) else reward.model
    before = torch.backends.cuda.matmul.fp32_precision
    model.classifier.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.matmul.fp32_precision))
    thread = threading.Thread(target=lambda: scored.append(reward(PROMPTS, RESPONSES)))
    with tf32(True):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not seen
    thread.join(20)
    assert seen and set(seen) == {before} and len(scored[0]) == len(PROMPTS)


def test_from_a_recipe(folders, tokenizer):
    options = {"path": str(folders / "bert"), "label": 2, "batch_size": 2}
    (reward,) = build_rewards([RewardSettings(use="classifier", options=options)], torch.device("cpu"))
    expected = logits(folders, tokenizer, "bert")[:, 2].tolist()
    assert reward.function(PROMPTS, RESPONSES, answer=[1, 2, 3]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "options", "part"),
    [
        ("lm", {}, "lm is not a trained classifier: score.weight is missing"),
        ("nowhere", {}, "cannot load a reward model from"),
        ("bert", {}, "has 3 outputs, NEG (0), MID (1), POS (2); set options.label to one of them"),
        ("bert", {"label": 3}, "NEG (0), MID (1), POS (2); options.label 3 is none of them"),
        ("bert", {"label": -1}, "options.label -1 is none of them"),
        ("bert", {"label": True}, "options.label True is none of them"),
        ("bert", {"label": "POSITIVE"}, "NEG (0), MID (1), POS (2); options.label 'POSITIVE' is none of them"),
        ("bert", {"score": "prob"}, "not 'prob'"),
        ("bert", {"dtype": "float64"}, "'float64'"),
    ],
)
def test_mistakes_with_a_classifier_are_explained(folders, kind, options, part):
    with pytest.raises(UserError) as error:
        ClassifierReward(str(folders / kind), **options)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("kind", "options", "part"),
    [
        ("lm", {"label": "LABEL_0"}, "lm is not a trained classifier"),
        ("nowhere", {"label": "POS"}, "cannot load a reward model from"),
        ("bert", {"label": "POSITIVE"}, "bert has no label 'POSITIVE'; it has NEG, MID, POS"),
        ("bert", {"label": "POS", "task": "text-generation"}, "not 'text-generation'"),
        ("bert", {"label": "POS", "apply": "relu"}, "not 'relu'"),
    ],
)
def test_mistakes_with_a_pipeline_are_explained(folders, kind, options, part):
    with pytest.raises(UserError) as error:
        PipelineReward(str(folders / kind), **options)
    assert part in str(error.value)


def test_a_classifier_reads_special_tokens_as_their_writer_meant_them(folders, tokenizer):
    """In a response they are text; in a prompt they are control tokens where the chat template wrote them."""
    (end,) = tokenizer("<|endoftext|>")["input_ids"]
    spelled = [tokenizer(letter)["input_ids"][0] for letter in "<|endoftext|>"]
    (a, b) = tokenizer("ab")["input_ids"]
    prompts = ["a<|endoftext|>", Written("a<|endoftext|>"), Written("a<|endoftext|>", [(1, 14)]), "a"]
    ids = [[a, *spelled, b], [a, *spelled, b], [a, end, b], [a, *spelled, b]]
    model = LlamaForSequenceClassification.from_pretrained(folders / "llama").eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        expected = [float(model(torch.tensor([row])).logits) for row in ids]
        controlled = float(model(torch.tensor([ids[2]])).logits)
    reward = ClassifierReward(str(folders / "llama"), batch_size=2)
    assert reward(prompts, ["b", "b", "b", "<|endoftext|>b"]) == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected[2]) > 1e-3
    reward = ClassifierReward(str(folders / "llama"), special_tokens="control")
    assert reward([prompts[0]] * 2, ["b", "<|endoftext|>"])[0] == pytest.approx(controlled, abs=1e-5)
