"""Every answer is learned after the prompt that sampling would see, however the chat template renders it later."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_helpers import CHATML, GPT_OSS, LLAMA2, LLAMA3, MARKED, NO_SIGNS, PHI3, QWEN3, R1, byte_pairs

from cavesson.data.answers import EMPTY, ENDLESS, OMITS, OPENS, PARTLY, REWRITES, Answers, answers
from cavesson.data.chat import Chat, Unrenderable
from cavesson.data.encode import LAST
from cavesson.data.examples import fingerprint, tokenize_demonstrations, tokenize_pairs
from cavesson.data.settings import PairSettings, TextSettings
from cavesson.data.types import Demonstration, Pair, Turn
from cavesson.errors import UserError

BPE = byte_pairs()
ASK, AGAIN = Turn("user", "2+3?"), Turn("user", "and 4?")
FIVE, NINE = Turn("assistant", "FIVE"), Turn("assistant", "NINE")
TALK = (ASK, FIVE, AGAIN, NINE)


def call(arguments: object, **others: object) -> Turn:
    function = {"name": "weather", "arguments": arguments}
    return Turn("assistant", None, {"tool_calls": [{"type": "function", "function": function}], **others})


def learned(found: Answers) -> list[list[str]]:
    """What is learned in each sequence."""
    return [[text[start:end] for start, end in spans] for text, spans in found.sequences]


def of(template: str, *turns: Turn, first: int = 0) -> Answers:
    return answers(Chat(BPE, template), turns, first)


def test_an_answer_that_is_rewritten_later_has_its_own_sequence():
    found = of(QWEN3, *TALK)
    thought = "<think>\n\n</think>\n\n"
    assert [str(text) for text, _ in found.sequences] == [
        f"<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n{thought}FIVE<|im_end|>\n",
        "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\nFIVE<|im_end|>\n"
        f"<|im_start|>user\nand 4?<|im_end|>\n<|im_start|>assistant\n{thought}NINE<|im_end|>\n",
    ]
    assert learned(found) == [[f"{thought}FIVE<|im_end|>"], [f"{thought}NINE<|im_end|>"]]
    assert found.remarks == [REWRITES]
    assert learned(of(QWEN3, *TALK, first=3)) == [[f"{thought}NINE<|im_end|>"]]
    assert of(QWEN3, *TALK, first=3).remarks == []


def test_answers_to_the_same_question_share_a_sequence_where_the_template_lets_them():
    used = call({"city": "Ulm"}, reasoning_content="It must be looked up.")
    found = of(QWEN3, ASK, used, Turn("tool", "7 C"), NINE, AGAIN, FIVE)
    made = '<think>\nIt must be looked up.\n</think>\n\n<call>weather {"city": "Ulm"}</call><|im_end|>'
    thought = "<think>\n\n</think>\n\n"
    assert learned(found) == [[made, f"{thought}NINE<|im_end|>"], [f"{thought}FIVE<|im_end|>"]]


def test_the_end_token_of_an_earlier_answer_is_learned_where_later_turns_change_it():
    found = of(GPT_OSS, *TALK)
    assert learned(found) == [[" says FIVE</s>"], [" says NINE</s>"]]
    thinking = Turn("assistant", "NINE", {"thinking": "5+4"})
    assert learned(of(GPT_OSS, ASK, thinking)) == [[" thinks 5+4<|im_end|><|im_start|>assistant says NINE</s>"]]
    # Both close the conversation with the end token, but here a turn has its own end token before.
    assert learned(of(PHI3, *TALK)) == [["FIVE<|im_end|>", "NINE<|im_end|>\n</s>"]]


def test_an_answer_that_is_asked_for_in_another_way_begins_where_it_differs_and_this_is_said():
    found = of(R1, *TALK)
    assert learned(found) == [["FIVE</s>", "NINE</s>"]]
    assert found.remarks == [OPENS]
    # An answer may by chance begin as the template asks for it, without being asked for in this way.
    assert learned(of(R1, ASK, Turn("assistant", "<thin ice"))) == [["<thin ice</s>"]]


def test_a_part_of_an_answer_that_the_template_cuts_out_is_reported():
    thinking = Turn("assistant", "<think>\n2+3 is 5\n</think>\n\nFIVE")
    assert OMITS in of(R1, ASK, thinking).remarks
    # This one writes the same with other line breaks.
    assert of(QWEN3, ASK, thinking).remarks == []
    assert learned(of(QWEN3, ASK, thinking)) == [["<think>\n2+3 is 5\n</think>\n\nFIVE<|im_end|>"]]


def test_answers_that_are_marked_as_not_learned_are_context():
    unlearned = Turn("assistant", "FIVE", learn=False)
    (sequence,) = of(CHATML, ASK, unlearned, AGAIN, NINE).sequences
    assert sequence.text == of(CHATML, *TALK).sequences[0].text
    assert learned(of(CHATML, ASK, unlearned, AGAIN, NINE)) == [["NINE<|im_end|>"]]
    # The tail is context that nothing follows, and is shown all the same.
    (sequence,) = of(CHATML, ASK, FIVE, AGAIN, Turn("assistant", "NINE", learn=False)).sequences
    assert sequence.text == of(CHATML, *TALK).sequences[0].text
    assert of(CHATML, ASK, unlearned).sequences == []


def test_an_empty_answer_is_reported_and_one_whose_call_is_not_written_is_refused():
    assert of(CHATML, ASK, Turn("assistant", "")).remarks == [EMPTY]
    with pytest.raises(Unrenderable, match="does not write 'tool_calls' of an answer that has no content"):
        of(PHI3.replace("message['content']", "(message['content'] or '')"), ASK, call({"city": "Ulm"}))


def test_only_answers_after_a_question_can_be_learned():
    with pytest.raises(Unrenderable, match="the assistant speaks first"):
        of(CHATML, FIVE)


def test_a_template_may_mark_only_the_last_answer():
    last_only = MARKED.replace("message['role'] == 'assistant'", "message['role'] == 'assistant' and loop.last")
    assert learned(of(last_only, *TALK)) == learned(of(MARKED, *TALK)) == [["FIVE<|im_end|>", "NINE<|im_end|>"]]
    assert learned(of(MARKED, *TALK, first=3)) == [["NINE<|im_end|>"]]
    never = MARKED.replace("message['role'] == 'assistant'", "message['role'] == 'tool'")
    with pytest.raises(Unrenderable, match="marks no part of an answer"):
        of(never, *TALK)


def marking(answer: str) -> str:
    """A template in the manner of ChatML that writes answers so."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + answer.replace("[", "{% generation %}").replace("]", "{% endgeneration %}")
        + "{{ '\\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


THOUGHT, CONTENT, END, BREAK = "<think>{{ m.thinking }}</think>", "{{ m.content }}", "<|im_end|>", "{{ '\\n' }}"


@pytest.mark.parametrize(
    ("answer", "parts", "remarks"),
    [
        (f"[{THOUGHT}{CONTENT}{END}]", ["<think>2+3</think>FIVE<|im_end|>"], []),
        (f"[{THOUGHT}][{CONTENT}{END}]", ["<think>2+3</think>", "FIVE<|im_end|>"], []),
        (f"[{THOUGHT}]{BREAK}[{CONTENT}{END}{BREAK}]", ["<think>2+3</think>", "FIVE<|im_end|>\n"], []),
        (f"[{THOUGHT}{CONTENT}]{END}", ["<think>2+3</think>FIVE"], [ENDLESS]),
        (f"[{THOUGHT}{CONTENT}]", ["<think>2+3</think>FIVE"], [ENDLESS]),  # a line break ends it
        (f"{THOUGHT}[{CONTENT}{END}]", ["FIVE<|im_end|>"], [PARTLY]),
        (f"{THOUGHT}[{CONTENT}]{END}", ["FIVE"], [PARTLY, ENDLESS]),
        (f"[{THOUGHT}]{CONTENT}[{END}]", ["<think>2+3</think>", "<|im_end|>"], [PARTLY]),
        (f"[{THOUGHT}{END}]{CONTENT}{END}", ["<think>2+3</think><|im_end|>"], [PARTLY]),
        (f"[{THOUGHT}]{CONTENT}{END}", ["<think>2+3</think>"], [PARTLY, ENDLESS]),
        # What ends the conversation after the end of the answer is not part of it, as in Phi-3's.
        (f"[{THOUGHT}{CONTENT}{END}]{BREAK}{{{{ eos_token }}}}", ["<think>2+3</think>FIVE<|im_end|>"], []),
    ],
)
def test_what_a_template_leaves_unmarked_of_an_answer_is_reported(answer, parts, remarks):
    found = of(marking(answer), ASK, Turn("assistant", "FIVE", {"thinking": "2+3"}))
    assert learned(found) == [parts]
    assert found.remarks == remarks


def test_a_header_is_not_an_unmarked_part_where_the_template_writes_none_before_answers():
    opening = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    headless = marking(f"[{CONTENT}{END}]").replace(opening, "")
    assert (learned(found := of(headless, ASK, FIVE)), found.remarks) == ([["FIVE<|im_end|>"]], [])
    assert of(marking(f"[{CONTENT}]{END}").replace(opening, ""), ASK, FIVE).remarks == [ENDLESS]
    # This one asks for reasoning that the answer does not have.
    asks = marking(f"[{CONTENT}{END}]").replace(opening, opening.replace("assistant", "assistant\n<think>"))
    assert (learned(found := of(asks, ASK, FIVE)), found.remarks) == ([["FIVE<|im_end|>"]], [OPENS])


def test_rows_with_an_unmarked_part_are_counted():
    rows = [Demonstration((ASK,), (Turn("assistant", word, {"thinking": "2+3"}),)) for word in ("FIVE", "5")]
    rows = [*rows, Demonstration((ASK,), (Turn("assistant", "FIVE", {"thinking": ""}),))]
    template = marking("{% if m.thinking %}" + THOUGHT + "{% endif %}[" + CONTENT + END + "]")
    result = tokenize_demonstrations(rows, BPE, TextSettings(path="a", template=template))
    assert len([*result]) == 3
    assert result.notes() == [f"2 × {PARTLY} (first: a: row 1)"]
    pairs = tokenize_pairs(
        [Pair((ASK,), (FIVE,), (NINE,))], BPE, PairSettings(path="a", template=marking(f"[{CONTENT}]{END}"))
    )
    assert len([*pairs]) == 1
    assert pairs.notes() == [f"1 × {ENDLESS} (first: a: row 1)"]


said = st.text("ab\n <>", max_size=5).map(lambda text: f"x{text}x")
thoughts = st.none() | said


@st.composite
def talks(draw) -> tuple[Turn, ...]:
    """A conversation of questions, each with one or more answers, between which a tool speaks."""
    turns: list[Turn] = []
    for _ in range(draw(st.integers(1, 3))):
        turns.append(Turn("user", draw(said)))
        for number in range(draw(st.integers(1, 2))):
            turns += [Turn("tool", draw(said))] if number else []
            thought = draw(thoughts)
            others = {} if thought is None else {"reasoning_content": thought}
            turns.append(Turn("assistant", draw(said), others, learn=draw(st.booleans())))
    return tuple(turns)


@pytest.mark.parametrize("template", [CHATML, QWEN3, GPT_OSS, NO_SIGNS, LLAMA3], ids=list("cqgnl"))
@given(talks())
def test_every_answer_is_learned_once_after_what_sampling_sees(template, talk):
    def written(turns: tuple[Turn, ...], *, ask: bool) -> str:
        messages = [turn.message for turn in turns]
        return BPE.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=ask)

    expected = []
    for number, turn in enumerate(talk):
        if turn.role == "assistant" and turn.learn:
            prompt, whole = written(talk[:number], ask=True), written(talk[: number + 1], ask=False)
            end = "\n" if whole.endswith("<|im_end|>\n") else ""  # what comes after the end token is not learned
            expected.append((prompt, whole.removeprefix(prompt).removesuffix(end)))
    sequences = answers(Chat(BPE, template), talk).sequences
    assert [(text[:start], text[start:end]) for text, spans in sequences for start, end in spans] == expected
    for (earlier, _), (later, _) in pairwise(sequences):
        assert not later.startswith(earlier)


def tokens(template: str, row: Demonstration, **options: object) -> tuple[list[str], list[str]]:
    """What is learned in every sequence, and the notes."""
    result = tokenize_demonstrations([row], BPE, TextSettings(path="a", template=template, **options))
    parts = [[token for token, learn in zip(one.ids, one.learn, strict=True) if learn] for one in result]
    return [BPE.decode(ids) for ids in parts], result.notes()


def test_a_row_gives_a_sequence_for_every_answer_that_is_rewritten():
    thought = "<think>\n\n</think>\n\n"
    assert tokens(QWEN3, Demonstration(TALK[:1], TALK[1:])) == (
        [f"{thought}FIVE<|im_end|>", f"{thought}NINE<|im_end|>"],
        [f"1 × {REWRITES} (first: a: row 1)"],
    )
    # The limit applies to each sequence.
    (first, _), _ = tokens(QWEN3, Demonstration(TALK[:1], TALK[1:]))
    one = len(
        next(iter(tokenize_demonstrations([Demonstration(TALK[:1], TALK[1:2])], BPE, TextSettings(template=QWEN3)))).ids
    )
    short, notes = tokens(QWEN3, Demonstration(TALK[:1], TALK[1:]), max_length=one, overlong="drop")
    assert short == [first]
    assert notes[1].startswith("1 × longer than data.max_length")


def test_of_a_pair_the_last_answer_is_compared_where_earlier_ones_are_rewritten():
    row = Pair(TALK[:1], TALK[1:], (*TALK[1:3], FIVE))
    result = tokenize_pairs([row], BPE, PairSettings(path="a", template=QWEN3))
    (pair,) = result
    for side, turns in ((pair.chosen, TALK), (pair.rejected, (*TALK[:3], FIVE))):
        *_, (text, ((start, end),)) = of(QWEN3, *turns).sequences
        assert BPE.decode(side.ids) == text
        assert (
            BPE.decode([token for token, learn in zip(side.ids, side.learn, strict=True) if learn]) == text[start:end]
        )
    assert result.notes() == [f"1 × {LAST} (first: a: row 1)"]
    # Otherwise, all answers are compared.
    (pair,) = tokenize_pairs([row], BPE, PairSettings(template=CHATML))
    assert (
        BPE.decode([t for t, learn in zip(pair.chosen.ids, pair.chosen.learn, strict=True) if learn]).count(
            "<|im_end|>"
        )
        == 2
    )


def test_a_row_of_which_nothing_may_be_learned_is_dropped_with_a_note():
    unlearned = Demonstration((ASK,), (Turn("assistant", "FIVE", learn=False),))
    assert tokens(CHATML, unlearned) == (
        [],
        ["1 × dropped: there is no turn of the assistant that may be learned (first: a: row 1)"],
    )
    with pytest.raises(
        UserError, match=r'^a: row 1: data.learn = "all" contradicts a turn that is marked as not learned'
    ):
        tokens(CHATML, unlearned, learn="all")


def test_marks_change_the_fingerprint_of_the_data():
    def seen(**marks: bool) -> str:
        turns = (FIVE, AGAIN, Turn("assistant", "NINE", **marks))
        return fingerprint(tokenize_demonstrations([Demonstration((ASK,), turns)], BPE, TextSettings(template=CHATML)))

    assert seen() == seen(learn=True) != seen(learn=False)


def test_llama2_s_answers_share_a_sequence():
    assert learned(of(LLAMA2, *TALK)) == [[" FIVE </s>", " NINE </s>"]]


@pytest.mark.parametrize("trim", [False, True])
def test_a_space_that_offsets_leave_out_belongs_to_its_token(trim):
    # The template writes the space, and the answer the word that makes one token with it.
    spaced = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    spaced += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer, row = byte_pairs(trim=trim), Demonstration((ASK,), (Turn("assistant", "river"),))
    result = tokenize_demonstrations([row], tokenizer, TextSettings(template=spaced))
    (one,) = result
    assert tokenizer.decode([token for token, learn in zip(one.ids, one.learn, strict=True) if learn]) == " river\n"
    assert result.notes()[0].startswith("1 × one token spans prompt and response")
