"""NEFTune: as much noise as the paper says, the same for an example wherever it lies, and none but in training."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models_helpers import sharp_model
from torch import Tensor

from cavesson.models.neftune import neftune
from cavesson.models.sequences import SequencePolicy, lay_out
from cavesson.ops.packing import RowShape
from cavesson.types import Batch

WIDTH = 24


def examples(lengths: list[int], rows: list[int] | None = None, step: int = 3) -> Batch:
    ids = torch.randint(2, 258, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
    mask[:, 0] = 0.0
    row = torch.tensor(rows if rows is not None else range(len(lengths)))
    return Batch(
        {"ids": ids, "learned": mask, "length": torch.tensor(lengths), "row": row, "step": torch.full_like(row, step)}
    )


def noise(batch: Batch, packed: bool, alpha: float = 5.0, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Of every example `[L, H]`, and all of it `[R·W, H]`."""
    layout = lay_out(batch["ids"], batch["length"], RowShape(100) if packed else None)
    embeddings = torch.zeros(*layout.ids.shape, WIDTH)
    whole = neftune(alpha, seed)(embeddings, layout, batch).flatten(0, 1)
    lengths = batch["length"].tolist()
    return [whole[layout.place[row, :length]] for row, length in enumerate(lengths)], whole


@pytest.mark.parametrize("packed", [True, False])
@settings(max_examples=min(20, settings.default.max_examples))
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), alpha=st.floats(0.5, 50))
def test_noise_is_within_alpha_over_the_root_of_length_times_width(
    packed: bool, lengths: list[int], alpha: float
) -> None:
    parts, whole = noise(examples(lengths), packed, alpha)
    for length, part in zip(lengths, parts, strict=True):
        bound = alpha / (length * WIDTH) ** 0.5
        assert float(part.abs().max()) <= bound * (1 + 1e-6)
        assert float(part.max()) > 0.5 * bound and float(part.min()) < -0.5 * bound
    assert float(whole.abs().sum()) == pytest.approx(sum(float(part.abs().sum()) for part in parts), rel=1e-4)


def test_noise_is_uniform() -> None:
    (part,), _ = noise(examples([2000]), packed=False)
    bound = 5 / (2000 * WIDTH) ** 0.5
    # 48,000 numbers: the variance bound²/3 is met within 2 %, the mean within 4 standard errors.
    assert float(part.var()) == pytest.approx(bound**2 / 3, rel=0.02)
    assert abs(float(part.mean())) < 4 * bound / (3 * part.numel()) ** 0.5


def test_noise_of_an_example_is_the_same_in_every_layout_and_micro_batch() -> None:
    lengths = [5, 2, 7, 3]
    packed, _ = noise(examples(lengths), packed=True)
    padded, _ = noise(examples(lengths), packed=False)
    for row, length in enumerate(lengths):
        alone, _ = noise(examples([length], rows=[row]), packed=True)
        assert torch.equal(packed[row], padded[row]) and torch.equal(packed[row], alone[0])


@pytest.mark.parametrize("change", [{"step": 4}, {"rows": [7]}, {"seed": 1}])
def test_every_step_row_and_seed_has_noise_of_its_own(change: dict[str, Any]) -> None:
    seed = change.pop("seed", 0)
    (one,), _ = noise(examples([20]), packed=False)
    (other,), _ = noise(examples([20], **change), packed=False, seed=seed)
    correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
    assert abs(float(correlation)) < 5 / one.numel() ** 0.5


@pytest.mark.parametrize("packed", [True, False])
def test_training_is_disturbed_and_evaluation_is_not(packed: bool) -> None:
    model, batch = sharp_model(), examples([6, 3, 4])
    quiet, noisy = SequencePolicy(model, packed), SequencePolicy(model, packed, neftune(20.0, 0))
    with torch.no_grad():
        assert torch.equal(noisy(batch).logprob, quiet(batch).logprob)
    seen, expected = noisy(batch).logprob, quiet(batch).logprob
    assert float((seen - expected).abs().max()) > 0.1
    embeddings = model.get_input_embeddings()
    assert not embeddings._forward_hooks  # nothing stays behind
    # The same noise on the embeddings of the plain model gives the same numbers.
    layout = lay_out(batch["ids"], batch["length"], None)
    disturbed = neftune(20.0, 0)(embeddings(batch["ids"]), layout, batch)
    for row, length in enumerate([6, 3, 4]):
        logits = model(inputs_embeds=disturbed[row : row + 1, :length]).logits[0, :-1].log_softmax(-1)
        plain = logits.gather(1, batch["ids"][row, 1:length, None]).squeeze(1)
        torch.testing.assert_close(seen[row, 1:length], plain, rtol=1e-3, atol=1e-3)
