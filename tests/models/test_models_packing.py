"""Several examples in a row: each is read as if it were alone."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models_helpers import absolute_model, sharp_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from cavesson.errors import UserError
from cavesson.models.load import prepare
from cavesson.models.parts import trunk
from cavesson.models.sequences import PairPolicy, RewardModel, SequencePolicy, hidden_states, lay_out
from cavesson.ops.packing import RowShape, pack, spread, width_of
from cavesson.types import Batch

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=7)
MODELS = {"rotary positions": sharp_model(), "learned positions": absolute_model()}


SHAPES = {"packed": RowShape(100), "padded": None}


@given(
    lengths=st.lists(st.integers(1, 40), max_size=20),
    balance=st.integers(0, 10_000),
    widest=st.integers(1, 200) | st.none(),
)
def test_every_sequence_has_one_place_and_packing_never_costs_more(
    lengths: list[int], balance: int, widest: int | None
) -> None:
    rows = pack(lengths, RowShape(balance, widest))
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    for row in rows:
        assert row and (len(row) == 1 or widest is None or sum(lengths[i] for i in row) <= widest)

    def cost(rows: list[list[int]]) -> int:
        width = width_of(lengths, rows)
        return len(rows) * width * (balance + width)

    others = [spread(lengths, count) for count in range(1, len(lengths) + 1)]
    several = [rows for rows in others if widest is None or width_of(lengths, rows) <= widest]
    assert cost(rows) <= min(map(cost, [*several, *others[-1:]]), default=0)


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7), count=st.integers(1, 4))
def test_rows_are_about_as_wide_as_the_best_ones(lengths: list[int], count: int) -> None:
    """Graham's bound, beside the best of all ways to spread them."""
    ways = itertools.product(range(count), repeat=len(lengths))
    best = min(
        max(sum(n for n, row in zip(lengths, way, strict=True) if row == r) for r in range(count)) for way in ways
    )
    assert width_of(lengths, spread(lengths, count)) <= (4 / 3 - 1 / (3 * count)) * best + 1e-9


def test_rows_worked_by_hand() -> None:
    lengths = [2, 6, 3, 4, 1]
    three, two = [[1], [3, 4], [2, 0]], [[1, 0], [3, 2, 4]]  # 3 · 6 tokens, and 2 · 8
    assert pack(lengths, RowShape(0)) == three  # 18 · 6 = 108; two rows cost 16 · 8 = 128
    assert pack(lengths, RowShape(20)) == two  # 16 · 28 = 448; three cost 18 · 26 = 468, one 16 · 36 = 576
    assert pack(lengths, RowShape(20, 7)) == three
    assert pack([9, 2, 2], RowShape(10**6, 8)) == [[0], [1], [2]]
    assert pack([], RowShape(1)) == []


def examples(lengths: list[int], seed: int = 0) -> Batch:
    """Random ids, learned but for the first; padding holds what must not matter."""
    width = max(lengths) + 2
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 258, (len(lengths), width), generator=generator)
    inside = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask = inside.float()
    mask[:, 0] = 0.0
    return Batch({"ids": ids, "learned": mask, "length": torch.tensor(lengths)})


@given(lengths=LENGTHS)
def test_ids_and_positions_stand_where_they_should(lengths: list[int]) -> None:
    batch = examples(lengths)
    layout = lay_out(batch["ids"], batch["length"], SHAPES["packed"])
    flat, taken = layout.ids.flatten(), []
    rows = pack(lengths, SHAPES["packed"])
    assert layout.ids.shape == (len(rows), width_of(lengths, rows))
    for row, length in enumerate(lengths):
        place = layout.place[row, :length]
        assert torch.equal(flat[place], batch["ids"][row, :length])
        if layout.positions is None:
            assert (place % max(lengths)).tolist() == list(range(length))
        else:
            assert layout.positions.flatten()[place].tolist() == list(range(length))
        taken += place.tolist()
    assert len(set(taken)) == len(taken) == sum(lengths)
    if layout.positions is not None:  # an example begins wherever the position does not go on, and nowhere else
        starts = {int(layout.place[row, 0]) for row in range(len(lengths))}
        filled = sorted(taken)
        begins = {p for p in filled if layout.positions.flatten()[p] == 0}
        assert begins == starts


@torch.no_grad()
def alone(model: nn.Module, ids: Tensor) -> Tensor:
    return trunk(model)(input_ids=ids[None], use_cache=False).last_hidden_state[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [RowShape(0), *SHAPES.values()], ids=["narrow", *SHAPES])
@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=min(30, settings.default.max_examples))
@given(lengths=LENGTHS)
def test_no_example_sees_another(kind: str, shape: RowShape | None, lengths: list[int]) -> None:
    model, batch = MODELS[kind], examples(lengths)
    layout = lay_out(batch["ids"], batch["length"], shape)
    with torch.no_grad():
        states = hidden_states(model, layout).flatten(0, 1)
    for row, length in enumerate(lengths):
        expected = alone(model, batch["ids"][row, :length])
        torch.testing.assert_close(states[layout.place[row, :length]], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_that_would_be_noticed(kind: str) -> None:
    """With positions that go on, or attention to what stands before, states differ by far more than rounding."""
    model, batch = MODELS[kind], examples([5, 3, 2])
    layout = lay_out(batch["ids"], batch["length"], RowShape(0))
    with torch.no_grad():
        mixed = hidden_states(model, layout._replace(positions=None)).flatten(0, 1)
    differences = [
        float((mixed[layout.place[row, :length]] - alone(model, batch["ids"][row, :length])).abs().max())
        for row, length in enumerate([5, 3, 2])
    ]
    assert differences[0] < 1e-4 and differences[1] < 1e-4 and differences[2] > 0.05


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", MODELS)
def test_tokens_and_pairs_are_scored_as_alone(kind: str, packed: bool) -> None:
    lengths = [7, 2, 5, 1, 3, 4]
    model, batch = MODELS[kind], examples(lengths)
    with torch.no_grad():
        scores = SequencePolicy(model, packed)(batch)
        for row, length in enumerate(lengths):
            logits = model(input_ids=batch["ids"][row : row + 1, :length]).logits[0, :-1].log_softmax(-1)
            expected = logits.gather(1, batch["ids"][row, 1:length, None]).squeeze(1)
            torch.testing.assert_close(scores.logprob[row, 1:length], expected, rtol=1e-4, atol=1e-4)
            entropy = -(logits.exp() * logits).sum(-1)
            torch.testing.assert_close(scores.entropy[row, 1:length], entropy, rtol=1e-4, atol=1e-4)
            assert not scores.logprob[row, length:].any() and scores.logprob[row, 0] == 0
        sides = {"chosen": [0, 1, 2], "rejected": [3, 4, 5]}
        columns = {f"{side}_{name}": batch[name][rows] for side, rows in sides.items() for name in batch.columns}
        pairs = PairPolicy(model, packed)(Batch(columns))
    torch.testing.assert_close(torch.cat(pairs), scores.logprob.sum(1), rtol=1e-4, atol=1e-4)


def mixing_model() -> PreTrainedModel:
    """An OPT, which makes no use of positions when it says which tokens see which."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = OPTConfig(vocab_size=258, max_position_embeddings=64, word_embed_proj_dim=32, init_std=0.2, **sizes)
    return prepare(OPTForCausalLM(config))


def test_a_model_that_would_mix_packed_examples_is_refused() -> None:
    model = mixing_model()
    with pytest.raises(UserError, match="opt does not keep packed examples apart; set"):
        SequencePolicy(model, packed=True)
    batch = examples([5, 3, 2])
    with torch.no_grad():
        scores = SequencePolicy(model, packed=False)(batch)
        expected = model(input_ids=batch["ids"][2:, :2]).logits[0, 0].log_softmax(-1)[batch["ids"][2, 1]]
    torch.testing.assert_close(scores.logprob[2, 1], expected, rtol=1e-4, atol=1e-4)


def test_an_encoder_is_never_packed() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=258, initializer_range=0.5, num_labels=1, pad_token_id=1, **sizes)
    model = prepare(BertForSequenceClassification(config))
    batch = examples([5, 3, 2, 4])
    sides = {"chosen": [0, 1], "rejected": [2, 3]}
    columns = {f"{side}_{name}": batch[name][rows] for side, rows in sides.items() for name in batch.columns}
    with torch.no_grad():
        seen = torch.cat(RewardModel(model, packed=True)(Batch(columns)))
        expected = [model(batch["ids"][row : row + 1, :n]).logits[0, 0] for row, n in enumerate([5, 3, 2, 4])]
    torch.testing.assert_close(seen, torch.stack(expected), rtol=1e-4, atol=1e-5)
