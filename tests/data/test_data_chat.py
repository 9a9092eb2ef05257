import pytest
from text_helpers import CHATML, LLAMA2, MARKED, NO_SIGNS, PHI3, byte_pairs

from cavesson.data.answers import answers
from cavesson.data.chat import Chat, read_template
from cavesson.data.settings import ChatSettings
from cavesson.data.types import Turn
from cavesson.errors import UserError

TALK = (Turn("user", "What is it?"), Turn("assistant", "A bridge.\n"), Turn("user", "Old?"), Turn("assistant", ""))


def chat(template: str, **settings: object) -> Chat:
    return Chat.of(ChatSettings(template=template, **settings), byte_pairs())


def spoken(template: str, first: int = 0) -> list[str]:
    return [text[start:end] for text, spans in answers(chat(template), TALK, first).sequences for start, end in spans]


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
    with pytest.raises(UserError, match=r"^the chat template is not valid: line 1: Expected an expression"):
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
