import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_helpers import CHATML, byte_pairs

from cavesson.data.chat import Chat
from cavesson.data.prompts import PromptSet, load_prompts, padded_prompts, tokenize
from cavesson.data.settings import PromptSettings
from cavesson.data.types import Answered
from cavesson.errors import UserError

TEXTS = ["The old bridge", 'said "yes", then', "größer 🙂", "two\nlines"]
ONLY_USERS = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('Only the user asks') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
ASKED = [{"role": "user", "content": "What is it?"}]


def load(path: Path, tokenizer, **settings: object) -> PromptSet:
    return load_prompts(PromptSettings(path=str(path), **settings), tokenizer)


def written(folder: Path, *rows: object) -> Path:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_prompts_come_with_their_other_columns(tmp_path, tokenizer):
    file = written(tmp_path, *({"prompt": text, "answer": n} for n, text in enumerate(TEXTS)), {"prompt": "x"})
    prompts = load(file, tokenizer)
    assert prompts.texts == (*TEXTS, "x")
    assert prompts.ids == tuple(tuple(tokenizer(text)["input_ids"]) for text in prompts.texts)
    assert prompts.columns == {"prompt": (*TEXTS, "x"), "answer": (0, 1, 2, 3, None)}
    assert prompts.dropped == ()


def test_a_text_file_has_one_prompt_a_line(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("The old bridge\n\nIt is\n", encoding="utf-8")
    assert load(tmp_path / "a.txt", tokenizer).texts == ("The old bridge", "It is")


def test_another_column_may_hold_the_prompts(tmp_path, tokenizer):
    prompts = load(
        written(tmp_path, {"question": "why?", "ground_truth": 7}), tokenizer, columns={"prompt": "question"}
    )
    assert prompts.texts == ("why?",)
    assert prompts.columns == {"question": ("why?",), "ground_truth": (7,)}


def test_a_conversation_is_asked_up_to_where_the_answer_begins(tmp_path):
    tokenizer = byte_pairs(bos=True)
    rows = [{"prompt": ASKED, "answer": 1}, {"messages": [*ASKED, {"role": "assistant", "content": "A river."}]}]
    for row in rows:
        prompts = load(written(tmp_path, row), tokenizer, template=CHATML)
        assert prompts.texts == ("<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n",)
        assert (
            list(prompts.ids[0])
            == tokenizer.apply_chat_template(ASKED, chat_template=CHATML, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )
    with pytest.raises(UserError, match=r"a\.jsonl: row 1: this is a conversation, .* set data\.template"):
        load(written(tmp_path, rows[0]), tokenizer)


def test_conversations_and_texts_may_be_given_from_python():
    tokenizer = byte_pairs()
    prompts = tokenize(
        [ASKED, "the old"], tokenizer, 99, columns={"n": [1, 2]}, chat=Chat(tokenizer, CHATML, of_texts=True)
    )
    start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert prompts.texts == (f"{start}What is it?{end}", f"{start}the old{end}")
    assert tokenize(["the old"], tokenizer, 99).texts == ("the old",)


def test_a_tokenizer_that_ends_texts_does_not_end_prompts():
    assert tokenize(["the old"], byte_pairs(eos=True), 9).ids == tokenize(["the old"], byte_pairs(), 9).ids


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.txt", b"\n \n", "contains no prompts"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": ""}', "row 2 has an empty prompt"),
        ("a.jsonl", b'{"prompt": "a", "responses": 1}', "rename the column 'responses'"),
        ("a.jsonl", b'{"prompt": "aaaa"}', "every prompt is over 3 tokens; raise data.max_prompt_tokens"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, tokenizer, name, content, part):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        load(file, tokenizer, max_prompt_tokens=3)
    message = str(error.value)
    assert message.startswith(str(file))
    assert part in message
    assert "\n" not in message


def test_what_was_given_from_python_is_named_too(tokenizer):
    with pytest.raises(UserError, match="the prompts: row 2: 'prompt' is 3, expected a text"):
        tokenize(["a", 3], tokenizer, 9)
    with pytest.raises(UserError, match="the prompts: row 1: the text contains half of a surrogate pair"):
        tokenize(["\ud83d"], tokenizer, 9)
    with pytest.raises(UserError, match="the prompts: there are no prompts"):
        tokenize([], tokenizer, 9)
    with pytest.raises(UserError, match=r"data\.path is missing"):
        load_prompts(PromptSettings(), tokenizer)
    with pytest.raises(UserError, match=r"data\.stream has no effect on prompts, which are kept in memory"):
        load_prompts(PromptSettings(path="a.txt", stream=True), tokenizer)


@pytest.mark.parametrize("name", ["prompts", "responses", "completions"])
def test_a_column_may_not_take_the_name_of_an_argument(tokenizer, name):
    with pytest.raises(UserError, match=f"rename the column '{name}'"):
        tokenize(["a"], tokenizer, 9, columns={name: [1]})


def test_long_prompts_are_dropped_and_named(tokenizer):
    prompts = tokenize(["a" * 9, "b" * 4, "c" * 5, "é" * 2], tokenizer, 4, columns={"n": [0, 1, 2, 3]})
    assert prompts.texts == ("bbbb", "éé")  # two characters of two bytes
    assert prompts.columns == {"n": (1, 3)}  # the rows stay together
    assert prompts.dropped == (0, 2)
    with pytest.raises(UserError, match="every prompt is over 3 tokens"):
        tokenize(["aaaa", "bbbbb"], tokenizer, 3)


def test_prompts_are_padded_on_the_left():
    batch = padded_prompts([[5], [6, 7, 8], [9, 10]])
    assert batch["prompt_ids"].tolist() == [[0, 0, 5], [6, 7, 8], [0, 9, 10]]
    assert batch["prompt_mask"].tolist() == [[0, 0, 1], [1, 1, 1], [0, 1, 1]]


def test_a_mix_keeps_its_weights(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("aaa\na\nb\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("c\nddd\n", encoding="utf-8")
    mix = [{"path": str(tmp_path / "a.txt"), "weight": 1}, {"path": str(tmp_path / "b.txt"), "weight": 3}]
    prompts = load_prompts(PromptSettings.model_validate({"mix": mix, "max_prompt_tokens": 2}), tokenizer)
    assert (prompts.texts, prompts.dropped) == (("a", "b", "c"), (0, 4))
    taken = [prompts.texts[i] for i in prompts.order(0, True).take(0, 80)]
    assert (taken.count("c"), taken.count("a"), taken.count("b")) == (60, 10, 10)


def prompt_set(n: int) -> PromptSet:
    return PromptSet(("x",) * n, ((5,),) * n, {}, ())


@given(st.integers(1, 30), st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_every_pass_covers_every_prompt_once(n, seed, number, shuffle):
    order = prompt_set(n).order(seed, shuffle).take(number * n, n)
    assert sorted(order) == list(range(n))
    if not shuffle:
        assert order == list(range(n))


@given(st.integers(1, 12), st.integers(0, 50), st.integers(0, 20), st.integers(0, 20), st.booleans())
def test_the_order_is_one_stream_however_it_is_cut(n, start, first, second, shuffle):
    order = prompt_set(n).order(3, shuffle)
    assert order.take(start, first) + order.take(start + first, second) == order.take(start, first + second)


def test_every_pass_and_every_seed_has_its_own_order():
    prompts = prompt_set(40)
    orders = [prompts.order(seed, True).take(40 * number, 40) for seed in (0, 1) for number in range(4)]
    assert len({tuple(order) for order in orders}) == 8
    assert prompts.order(1, True).take(40, 40) == orders[5]


def test_a_prompt_that_the_template_cannot_render_is_dropped_and_counted(tmp_path, tokenizer):
    """One row does not end a run; its columns and its place among the rows go with it."""
    tool = [{"role": "tool", "content": "4"}]
    file = written(
        tmp_path, *({"prompt": prompt, "level": n} for n, prompt in enumerate([ASKED, tool, ASKED, "x" * 300]))
    )
    prompts = load(file, tokenizer, template=ONLY_USERS, max_prompt_tokens=200)
    assert len(prompts) == 2 and prompts.columns["level"] == (0, 2)
    assert (prompts.dropped, prompts.unrendered, prompts.overlong) == ((1, 3), (1,), [3])
    assert [note for note in prompts.notes if "dropped" in note] == [
        f"1 × dropped: the chat template cannot render this conversation: Only the user asks (first: {file}: row 2)"
    ]
    with pytest.raises(UserError, match="no prompt can be used; 1 × dropped: the chat template cannot render"):
        load(written(tmp_path, {"prompt": tool}), tokenizer, template=ONLY_USERS)


def test_responses_are_the_tokens_that_a_model_would_be_fine_tuned_on(tmp_path):
    """In a conversation, they begin where the sampler's answer would, and end with the token that ends a turn."""
    tokenizer = byte_pairs()
    tokenizer.chat_template = CHATML
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    file = written(tmp_path, {"messages": turns}, {"messages": [*turns, *turns]})
    settings = PromptSettings(path=str(file))
    prompts = load_prompts(settings, tokenizer, kind=Answered)
    assert prompts.ids == load_prompts(settings, tokenizer).ids
    assert load_prompts(settings, tokenizer).responses == ()
    for prompt, response in zip(prompts.ids, prompts.responses, strict=True):
        assert response.prompt == prompt and all(response.learn)
        assert tokenizer.decode(response.ids) == "Hello<|im_end|>"


def test_a_token_that_is_part_prompt_is_part_of_the_response(tmp_path, tokenizer):
    """As in fine-tuning; the tokens of prompt and response together are those of the whole text."""
    file = written(tmp_path, *({"prompt": text[:5], "response": text[5:]} for text in TEXTS))
    prompts = load_prompts(PromptSettings(path=str(file)), tokenizer, kind=Answered)
    for text, found in zip(TEXTS, prompts.responses, strict=True):
        assert [*found.prompt, *found.ids] == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        assert found.prompt == tuple(tokenizer(text[:5])["input_ids"])[: len(found.prompt)]


def test_responses_are_those_of_the_prompts_that_are_kept(tmp_path, tokenizer):
    rows = [{"prompt": "x " * n, "response": f"answer {n}"} for n in (1, 90, 2)]
    prompts = load_prompts(
        PromptSettings(path=str(written(tmp_path, *rows)), max_prompt_tokens=20), tokenizer, kind=Answered
    )
    assert prompts.dropped == (1,)
    assert [tokenizer.decode(one.ids, skip_special_tokens=True)[-1] for one in prompts.responses] == ["1", "2"]
