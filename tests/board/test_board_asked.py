"""Lists show what prompts ask: not the system prompt, and not the beginning that all share."""

from pathlib import Path

import pytest
from board_helpers import board_of, client_of
from index_helpers import new_run, record

TASK = "Solve the following problem, and write the answer of the problem behind ####.\n\n"
SYSTEM = "You are a helpful assistant. " * 20
FORMS = {
    "decoded": "system\n{}\nuser\n{}\nassistant\n",
    "chatml": "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "marks": "[system]\n{}\n\n[user]\n{}",
}
QUESTIONS = ["What is 6 * 7?", "What is six times eight?", TASK]


def shown(folder: Path, prompts: list[str]) -> list[str]:
    """What the table shows of each prompt; the other lists show the same."""
    record(new_run(folder / "run"), [0, 1], prompt=[text for text in prompts for _ in range(2)], batch=2 * len(prompts))
    client = client_of(board_of(folder / "run"))

    def get(path: str) -> dict:
        return client.get(f"/api/runs/run/{path}").json()

    rows = get("rows?limit=500")["rows"]
    found = {row["sample"]: row["prompt"] for row in rows}
    assert len(rows) == 4 * len(prompts) and all(found[row["sample"]] == row["prompt"] for row in rows)
    for lines in (get("groups?step=1")["groups"], get("prompts")["prompts"]):
        assert sorted(line["prompt"] for line in lines) == sorted({*found.values()})
    return [found[2 * place] for place in range(len(prompts))]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_all_prompts_share_is_left_out(tmp_path, form):
    prompts = [form.format(SYSTEM, TASK + question) for question in QUESTIONS]
    assert shown(tmp_path, prompts) == ["…What is 6 * 7?", "…What is six times eight?", "…" + TASK.strip()]


def test_a_short_beginning_and_a_single_prompt_are_shown(tmp_path):
    assert shown(tmp_path / "two", ["What is 6 * 7?", "What is 8?"]) == ["What is 6 * 7?", "What is 8?"]
    assert shown(tmp_path / "one", [TASK]) == [TASK]


def test_a_prompt_that_begins_otherwise_or_is_only_the_beginning_is_shown_whole(tmp_path):
    prompts = [TASK + question for question in QUESTIONS[:2]] + [TASK]
    assert shown(tmp_path / "a", prompts) == ["…What is 6 * 7?", "…What is six times eight?", TASK]
    prompts = [TASK + QUESTIONS[0], TASK + QUESTIONS[1], "Another task."]
    assert shown(tmp_path / "b", prompts) == prompts


def test_a_prompt_opened_alone_is_whole(tmp_path):
    prompts = [TASK + question for question in QUESTIONS[:2]]
    record(new_run(tmp_path / "run"), [0], prompt=prompts, batch=2)
    client = client_of(board_of(tmp_path / "run"))
    assert client.get("/api/runs/run/rollouts/0/1").json()["prompt"] == prompts[1]
    line = client.get("/api/runs/run/prompts").json()["prompts"][0]
    assert client.get(f"/api/runs/run/prompts/{line['prompt_id']}").json()["prompt"] in prompts
