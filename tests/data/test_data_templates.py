"""What a template gets: the whole message in the form that it expects, options, and nothing that looks like a token."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_helpers import CHATML, LLAMA3, QWEN3, R1, SPECIAL, byte_pairs

from cavesson.data.chat import Chat, Unrenderable
from cavesson.data.encode import Asked, Encoder
from cavesson.data.examples import load_demonstrations
from cavesson.data.settings import ChatSettings, PromptSettings, TextSettings
from cavesson.data.types import Turn
from cavesson.errors import UserError

BPE = byte_pairs()
ASK = Turn("user", "Weather?")
ULM = {"city": "Ulm", "days": 2, "exact": None}
THOUGHT = ("reasoning_content", "thinking", "reasoning")
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text or p.type }}]{% endfor %}{% endfor %}"
TEXTS = "{% for m in messages %}{% for p in m.content if p.type == 'text' %}[{{ p.text }}]{% endfor %}{% endfor %}"


def call(arguments: object, **function: object) -> Turn:
    return Turn(
        "assistant", None, {"tool_calls": [{"id": None, "function": {"name": "f", "arguments": arguments, **function}}]}
    )


def render(template: str, *turns: Turn, **options: object) -> str:
    return Chat(BPE, template, options=options).render(turns)


@pytest.mark.parametrize("arguments", [ULM, json.dumps(ULM)])
def test_a_template_gets_the_arguments_of_a_call_as_an_object_or_as_text_as_it_needs_them(arguments):
    text = json.dumps(ULM)
    assert f"<call>f {text}</call>" in render(QWEN3, ASK, call(arguments))
    assert f'"parameters": {text}}}' in render(LLAMA3, ASK, call(arguments))
    assert f"f {text}</s>" in render(R1, ASK, call(arguments))
    printed = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert render(printed, ASK, call(arguments)) == text
    # Some test what they get, and would print an object as Python does.
    tested = printed.replace(
        "c.function.arguments }}", "c.function.arguments if c.function.arguments is string else 1 }}"
    )
    assert render(tested, ASK, call(arguments)) == "1"


def test_a_text_in_arguments_that_looks_like_python_s_writing_is_no_reason_for_another_form():
    turns = (Turn("user", str(ULM)), call(ULM))
    assert json.dumps(ULM) in render(QWEN3, *turns)
    assert json.dumps(json.dumps(ULM)) not in render(QWEN3, *turns)


def test_arguments_that_python_writes_as_json_does_stay_an_object():
    assert """<call>f {"it's": 1}</call>""" in render(QWEN3, ASK, call({"it's": 1}))


def test_arguments_that_are_no_object_stay_what_they_are():
    assert '<call>f "Ulm, please"</call>' in render(QWEN3, ASK, call("Ulm, please"))
    assert "f Ulm, please</s>" in render(R1, ASK, call("Ulm, please"))


def test_calls_may_be_json_text():
    whole = call(ULM)
    as_text = Turn("assistant", None, {"tool_calls": json.dumps(whole.others["tool_calls"])})
    assert render(QWEN3, ASK, as_text) == render(QWEN3, ASK, whole)


def test_null_is_never_written_as_a_word():
    saying = (
        "{% for m in messages %}<{{ m.content }}>{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}{% endfor %}"
    )
    assert render(saying, Turn("user", "None?"), call(ULM)) == "<None?><>"
    assert render(CHATML, ASK, call(ULM)).endswith("assistant\n<|im_end|>\n")  # it would fail to add null to a text
    assert " {" in render(R1, ASK, call(ULM))  # it tests for null


def test_parts_are_written_one_by_one_or_as_one_text():
    parts = Turn("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert render(PARTS, parts) == render(TEXTS, parts) == "[a][b]"
    assert "user\nab<|im_end|>" in render(CHATML, parts)
    assert "user\nab<|im_end|>" in render(LLAMA3, parts)  # `trim` would make Python's writing of the list
    picture = Turn("user", [{"type": "text", "text": "a"}, {"type": "image", "url": "x"}])
    assert render(PARTS, picture) == "[a][image]"
    for template in (TEXTS, CHATML, LLAMA3):
        with pytest.raises(Unrenderable, match=r"^the chat template cannot render this conversation: "):
            render(template, picture)
    with pytest.raises(Unrenderable, match=r"it does not write a part of type 'image'$"):
        render(TEXTS, picture)


@pytest.mark.parametrize("name", THOUGHT)
def test_reasoning_is_found_under_each_of_its_names(name):
    turn = Turn("assistant", "7 C", {name: "hm"})
    assert "<think>\nhm\n</think>\n\n7 C" in render(QWEN3, ASK, turn)
    assert render("{{ messages[0].thinking }}", turn) == "hm"


def test_a_message_has_every_field_and_no_other():
    turn = Turn("tool", "7 C", {"tool_call_id": "c1", "name": "f"})
    assert json.loads(render("{{ messages[0] | tojson }}", turn)) == turn.message


def remarks(template: str, *turns: Turn, tools: tuple[dict, ...] = (), response: tuple[Turn, ...] = ()) -> list[str]:
    return Encoder(Chat(BPE, template)).remarks(Asked("here", turns, (response,) if response else (), tools))


def test_fields_that_make_no_difference_are_named():
    answer = Turn("assistant", "7 C", {"reasoning_content": "hm", "id": 5})
    asked = Turn("user", "Weather?", {"name": "Eva"})
    assert remarks(CHATML, asked, response=(answer,)) == [
        "the chat template does not use 'name' of user messages",
        "the chat template does not use 'reasoning_content' of assistant messages",
        "the chat template does not use 'id' of assistant messages",
    ]
    assert remarks(QWEN3, ASK, response=(answer,)) == ["the chat template does not use 'id' of assistant messages"]
    # Here the reasoning is used before the question that follows.
    assert remarks(QWEN3, ASK, answer, ASK) == ["the chat template does not use 'id' of assistant messages"]
    assert remarks("{{ messages | tojson }}", asked, response=(answer,)) == []


def test_what_a_role_says_and_tools_can_be_unused_too():
    deaf = CHATML.replace(
        "{{ '<|im_start|>' + message", "{% if message.role != 'tool' %}{{ '<|im_start|>' + message", 1
    )
    deaf = deaf.replace("{% endfor %}", "{% endif %}{% endfor %}")
    turns = (ASK, call(ULM), Turn("tool", "7 C"))
    assert remarks(deaf, *turns)[-1] == "the chat template does not use 'content' of tool messages"
    assert remarks(QWEN3, *turns, tools=({"name": "f"},)) == []
    assert remarks(CHATML, ASK, tools=({"name": "f"},)) == ["the chat template does not use tools"]
    plain = Encoder(Chat(BPE)).remarks(Asked("here", "Weather?", (), ({"name": "f"},)))
    assert plain == ["tools are not used, because this is plain text; set data.chat"]


def test_a_field_is_used_if_it_ever_makes_a_difference():
    encoder = Encoder(Chat(BPE, QWEN3))
    thinking = Asked("here", (ASK,), ((Turn("assistant", "7 C", {"reasoning_content": "hm"}),),))
    earlier = Asked("here", (ASK,), ((Turn("assistant", "", {"reasoning_content": ""}),),))
    assert encoder.remarks(earlier) == ["the chat template does not use 'reasoning_content' of assistant messages"]
    assert encoder.remarks(thinking) == []
    assert encoder.remarks(earlier) == []


hostile = st.lists(st.sampled_from([*SPECIAL, "a", '"', "\\"]), min_size=1, max_size=4).map("".join)


@pytest.mark.parametrize("template", [QWEN3, R1, LLAMA3, "{{ messages | tojson }}<|im_end|>"], ids=list("qrlj"))
@given(hostile, hostile, hostile, st.booleans())
def test_no_text_of_a_message_is_mistaken_for_a_token_of_the_template(template, key, value, thought, as_text):
    arguments = {key: [value, {value: key}]}
    other = call(json.dumps(arguments) if as_text else arguments, name=value)
    other.others["reasoning_content"] = thought
    harmless = call({"k": ["v", {"v": "k"}]}, name="v")
    harmless.others["reasoning_content"] = "t"
    chat = Chat(BPE, template)
    text, plain = chat.render((ASK, other)), chat.render((ASK, harmless))
    assert [text[start:end] for start, end in text.control] == [plain[start:end] for start, end in plain.control]
    (line,) = Encoder(chat).prompts([Asked("here", (ASK, other))])
    asked = chat.render((ASK, other), answer=True)
    assert [one for one in line.ids if one in BPE.convert_tokens_to_ids(SPECIAL)] == BPE.convert_tokens_to_ids(
        [asked[start:end] for start, end in asked.control]
    )
    assert BPE.decode(line.ids) == asked


def test_options_reach_the_template_everywhere():
    options = {"enable_thinking": False}
    chat = Chat.of(ChatSettings(template=QWEN3, template_options=options), BPE)
    assert chat.render((ASK,), answer=True).endswith("assistant\n<think>\n\n</think>\n\n")
    assert not Chat(BPE, QWEN3).render((ASK,), answer=True).endswith("</think>\n\n")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "strftime_now"])
def test_an_option_that_we_set_ourselves_is_an_error(name):
    with pytest.raises(ValueError, match=f"'{name}' is set by Cavesson and cannot be an option of the template"):
        ChatSettings(template_options={name: 1})


def test_an_option_without_effect_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"^data\.template_options: the chat template does not read 'enable_thinking'"):
        Chat(BPE, CHATML, options={"enable_thinking": False}).render((ASK,))
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    settings = TextSettings(path=str(file), template_options={"enable_thinking": False})
    with pytest.raises(UserError, match=r"row 1: this is plain text; data\.template_options is for conversations"):
        load_demonstrations(settings, BPE, 0)
    assert PromptSettings(template_options={"a": 1}).template_options == {"a": 1}
