import pytest
from text_helpers import CHATML, FORGETFUL, LLAMA2, MARKED, NO_SIGNS, PHI3, byte_pairs

from cavesson.data.chat import Chat, read_template
from cavesson.data.settings import ChatSettings
from cavesson.data.types import Turn
from cavesson.errors import UserError

TALK = (Turn("user", "What is it?"), Turn("assistant", "A bridge.\n"), Turn("user", "Old?"), Turn("assistant", ""))


def chat(template: str, **settings: object) -> Chat:
    return Chat.of(ChatSettings(template=template, **settings), byte_pairs())


def spoken(template: str, first: int = 0) -> list[str]:
    text, spans = chat(template).spans(TALK, first)
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize("answer", [False, True])
def test_a_template_writes_what_transformers_writes(answer):
    tokenizer = byte_pairs()
    messages = [{"role": turn.role, "content": turn.content} for turn in TALK]
    for template in (CHATML, MARKED, LLAMA2, PHI3):
        assert Chat(tokenizer, template).render(TALK, answer=answer) == tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=answer
        )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["A bridge.\n<|im_end|>", "<|im_end|>"]),
        (MARKED, ["A bridge.\n<|im_end|>", "<|im_end|>"]),
        (LLAMA2, [" A bridge.\n </s>", "  </s>"]),
        # What closes the whole conversation is the last answer's as well.
        (PHI3, ["A bridge.\n<|im_end|>", "<|im_end|>\n</s>"]),
        # Nothing but the line break ends a turn.
        (NO_SIGNS, ["A bridge.\n\n", "\n"]),
    ],
)
def test_the_assistant_s_part_is_what_it_would_write_up_to_its_end_token(template, expected):
    assert spoken(template) == expected
    assert spoken(template, first=3) == expected[1:]
    assert spoken(template, first=4) == []


@pytest.mark.parametrize("thought", ["", "<think>hm</think>"])
def test_a_template_that_writes_earlier_turns_anew_is_refused(thought):
    talk = (TALK[0], Turn("assistant", thought + "A bridge."), *TALK[2:])
    writer = chat(FORGETFUL)
    if not thought:
        assert len(writer.spans(talk)[1]) == 2
        return
    with pytest.raises(
        UserError, match=r"turn 2, the assistant's, .* data.template to a template with {% generation %}"
    ):
        writer.spans(talk)
    # The last answer is not followed by any turn.
    assert len(writer.spans(talk[:2])[1]) == 1


def test_an_answer_that_begins_otherwise_than_it_is_asked_for_is_refused():
    opening = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif")
    with pytest.raises(UserError, match="differently when it asks for it"):
        chat(opening).spans(TALK)


def test_only_answers_after_a_question_can_be_told_apart():
    with pytest.raises(UserError, match="the assistant speaks first"):
        chat(CHATML).spans(TALK[1:])


def test_a_template_that_marks_only_some_turns_is_refused_where_it_matters():
    last_only = MARKED.replace("message['role'] == 'assistant'", "message['role'] == 'assistant' and loop.last")
    assert len(chat(last_only).spans(TALK)[1]) == 1
    with pytest.raises(UserError, match="marks 1 parts in 2 turns of the assistant"):
        chat(last_only).spans(TALK, first=2)


def test_the_system_speaks_first_where_nobody_said_anything_of_it():
    ours = chat(CHATML, system="Be kind.")
    assert ours.opened(TALK) == (Turn("system", "Be kind."), *TALK)
    theirs = (Turn("system", "Be short."), *TALK)
    assert ours.opened(theirs) == theirs
    assert chat(CHATML).opened(TALK) == TALK


def test_tools_reach_the_template():
    listing = "{% for tool in tools %}{{ tool['name'] }};{% endfor %}" + CHATML
    assert chat(listing).render(TALK[:1], [{"name": "clock"}]).startswith("clock;<|im_start|>user")


def test_what_a_template_cannot_write_is_said_in_one_line():
    with pytest.raises(UserError, match=r"^the chat template cannot render this conversation: Only user and assistant"):
        chat(LLAMA2).render((Turn("tool", "4"),))
    with pytest.raises(UserError, match="cannot render this conversation: "):
        chat("{% if %}").render(TALK)
    with pytest.raises(UserError, match="cannot render this conversation: "):
        chat("{{ messages + 'x' }}").render(TALK)
    with pytest.raises(UserError, match=r"no chat template; set data\.template"):
        Chat(byte_pairs()).render(TALK)


def test_a_template_is_a_file_or_itself(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML, encoding="utf-8")
    assert read_template(str(file)) == read_template(CHATML) == CHATML
    assert read_template(None) is None
    with pytest.raises(UserError, match=r"data\.template: cannot read 'nowhere\.jinja'"):
        read_template("nowhere.jinja")


def test_our_template_comes_before_the_tokenizer_s():
    tokenizer = byte_pairs()
    tokenizer.chat_template = CHATML
    assert Chat(tokenizer).render(TALK[:1]) == "<|im_start|>user\nWhat is it?<|im_end|>\n"
    assert Chat(tokenizer, NO_SIGNS).render(TALK[:1]) == "user:\nWhat is it?\n"
