"""Calls are read as the tokenizer says or as the chat template writes them, and what is not a call becomes an error."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_helpers import END, TOOL, chat, tokenizer

from cavesson.data.chat import Chat
from cavesson.data.special_tokens import Written
from cavesson.data.types import Turn
from cavesson.errors import UserError
from cavesson.rollout.calls import NAMED, CallFormat
from cavesson.rollout.types import Call

ASK = Turn("user", "What is 6 * 7?")
ARGUMENTS = {"a": 6, "b": 7}
FORMATS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "smollm3": "hermes",
    "hermes": "hermes",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "mistral_v3": "mistral",
    "mistral_v7": "mistral",
    "mistral_v13": "mistral",
}
OTHERS = ["phi4", "granite", "command_r", "internlm"]
"""Templates that write JSON between marks of their own."""
ONE_CALL = ["llama3_1", "llama3_2"]
hostile = st.sampled_from(
    [
        "</tool_call>",
        "<tool_call>",
        "[TOOL_CALLS]",
        "</think>",
        "<think>",
        '"',
        "\\",
        "\n",
        "}",
        "]",
        ";",
        "<|im_end|>",
        "é🦜",
    ]
)
texts = st.lists(hostile | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=4).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(texts, values, max_size=3)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)


def form(name: str) -> CallFormat:
    return CallFormat.of(chat(name), [TOOL])


def calls_of(*calls: tuple[str, dict]) -> Turn:
    made = [
        {"id": f"abcdef{number:03d}", "type": "function", "function": {"name": name, "arguments": given}}
        for number, (name, given) in enumerate(calls)
    ]
    return Turn("assistant", None, {"tool_calls": made})


def sampled(name: str, turn: Turn) -> list[int]:
    """The tokens that a model would have to sample so that the template writes this turn."""
    one = chat(name)
    asked, whole = one.render([ASK], [TOOL], answer=True), one.render([ASK, turn], [TOOL])
    assert whole.startswith(asked)
    text = whole[len(asked) : whole.rindex(END[name]) + len(END[name])]
    (encoded,) = one.special.encode([Written(text, one.special.spans(text))], add=False)
    return encoded.ids


@pytest.mark.parametrize("name", FORMATS)
def test_the_named_formats_are_found_in_what_the_template_writes(name):
    assert form(name).read.form == NAMED[FORMATS[name]]


@pytest.mark.parametrize("name", [*FORMATS, *OTHERS])
@given(st.data())
def test_calls_that_a_template_has_written_are_read_back(name, data):
    most = 1 if name in ONE_CALL else 3
    calls = data.draw(st.lists(st.tuples(names, arguments), min_size=1, max_size=most))
    content, found = form(name).parse(sampled(name, calls_of(*calls)))
    assert [(call.name, call.arguments, call.error) for call in found] == [(*call, None) for call in calls]
    assert content == ("<think>\n\n</think>" if name == "qwen3" else "")


@pytest.mark.parametrize("name", ["mistral_v3", "mistral_v7"])
def test_the_identifier_that_the_model_gave_is_known(name):
    _, found = form(name).parse(sampled(name, calls_of(("f", {}), ("g", {}))))
    assert [call.id for call in found] == ["abcdef000", "abcdef001"]


@pytest.mark.parametrize("name", [*FORMATS, *OTHERS])
def test_an_answer_without_a_call_is_its_text_without_the_end_token(name):
    text = ' It is {"answer": 42}, [1]  '
    assert form(name).parse(text) == (text, [])
    assert form(name).parse(text + tokenizer(name).eos_token) == (text, [])


def test_text_around_calls_is_the_content():
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
    content, found = form("qwen2_5").parse(f"Let me see.\n{call}\nand\n{call}\nDone.<|im_end|>")
    assert content.split() == ["Let", "me", "see.", "and", "Done."]
    assert found == [Call("multiply", ARGUMENTS)] * 2
    content, found = form("granite").parse('I call.<|tool_call|>[{"name": "f", "arguments": {}}]<|end_of_text|>')
    assert (content, found) == ("I call.", [Call("f", {})])


def test_llama_writes_calls_only_at_the_start_of_a_turn_and_other_json_is_an_answer():
    llama = form("llama3_1")
    call = '{"name": "multiply", "parameters": {"a": 6, "b": 7}}'
    assert llama.parse(f"<|python_tag|>{call}<|eom_id|>") == ("", [Call("multiply", ARGUMENTS)])
    assert llama.parse(f'{{"type": "function", {call[1:]}; {call}<|eot_id|>') == ("", [Call("multiply", ARGUMENTS)] * 2)
    for answer in ('{"name": "Ada", "age": 36}', '{"a": 1', f"I would write {call}"):
        assert llama.parse(answer) == (answer, [])


@pytest.mark.parametrize("thought", ["<think>\nI could write {call}\n</think>\n\n", "<think>{call}"])
def test_what_is_written_while_thinking_is_not_a_call(thought):
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    text = thought.format(call=call)
    assert form("qwen3").parse(text) == (text, [])
    if "</think>" in text:
        assert form("qwen3").parse(text + call)[1] == [Call("f", {})]
        opened = Chat(
            tokenizer("qwen3"),
            tokenizer("qwen3").chat_template.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}"),
        )
        assert CallFormat.of(opened, [TOOL]).parse(text.removeprefix("<think>\n") + call)[1] == [Call("f", {})]


@pytest.mark.parametrize(
    ("written", "name", "problem"),
    [
        ('{"name": "f", "arguments": {"a": }}', "f", "the call is not valid JSON: Expecting value"),
        (
            '{"name": "f", "arguments": {"a": 1}}}',
            "f",
            "JSON: there is text between the JSON and </tool_call>",
        ),
        ("multiply 6 and 7", "", "the call is not valid JSON"),
        ('{"arguments": {}}', "", "the call has no name"),
        ('{"name": 5, "arguments": {}}', "", "the call has no name"),
        ('{"name": "f", "arguments": [1]}', "f", "the arguments are not a JSON object"),
        ('{"name": "f", "arguments": "{}"}', "f", "the arguments are not a JSON object"),
        ("5", "", "a call must be a JSON object with a name and arguments"),
        ('{"name": "f", "arguments": {"a": NaN}}', "", "the call contains NaN, Infinity or half of a surrogate pair"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "", "the call contains NaN"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "", "half of a surrogate pair"),
        ("[" * 100_000, "", "the call is not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_and_stays_in_the_content(written, name, problem):
    good = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    broken = f"<tool_call>\n{written}\n</tool_call>"
    content, (bad, fine) = form("qwen2_5").parse(f"{broken}\n{good}<|im_end|>")
    assert (bad.name, bad.arguments) == (name, {})
    assert problem in bad.error
    assert fine == Call("g", {})
    assert content == broken


def test_a_call_that_is_cut_is_an_error_and_one_that_lacks_only_its_closing_mark_is_not():
    whole = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}'
    assert form("qwen2_5").parse(whole) == ("", [Call("f", {"a": 1})])
    content, (call,) = form("qwen2_5").parse(whole[:-2])
    assert (content, call.name) == (whole[:-2], "f")
    assert call.error.startswith("the call is not valid JSON")


@given(st.text(max_size=20), st.sampled_from(sorted(NAMED)))
def test_any_text_is_read(text, name):
    for opening in ("", NAMED[name].opening, NAMED[name].opening + '{"name": "f", "parameters": '):
        content, found = CallFormat.of(chat("qwen2_5"), [TOOL], name).parse(opening + text)
        assert content or found or not (opening + text).strip()


def test_the_response_template_of_a_tokenizer_comes_first():
    one = chat("qwen3_5_think")
    with pytest.raises(UserError, match=r"cannot be read, '<tool_call>\\n<function=probe>.*call_format"):
        CallFormat.of(one, [TOOL])
    one.tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    try:
        ids = sampled("qwen3_5_think", calls_of(("multiply", ARGUMENTS), ("multiply", {"a": 1, "b": 2})))
        made = [Call("multiply", ARGUMENTS), Call("multiply", {"a": 1, "b": 2})]
        # The template asks for reasoning, so a turn begins in it; the integers are known by the tool's schema.
        assert CallFormat.of(one, [TOOL]).parse(ids) == ("", made)
        assert CallFormat.of(one, [TOOL]).parse("Hm.\n</think>\n\nIt is 42.<|im_end|>") == ("It is 42.", [])
        one.tokenizer.response_template["fields"]["tool_calls"]["content"] = "json"
        content, (call,) = CallFormat.of(one, [TOOL]).parse("</think><tool_call>\n<function=f>\n{</tool_call>")
        assert content.startswith("</think><tool_call>")
        assert call.error.startswith("the response cannot be parsed: ")
    finally:
        one.tokenizer.response_template = None


def test_a_format_may_be_named_where_it_cannot_be_found():
    harmony = chat("gptoss")
    with pytest.raises(UserError, match=r"cannot be read, ' to=functions\.probe"):
        CallFormat.of(harmony, [TOOL])
    assert CallFormat.of(harmony, [TOOL], "hermes").read.form == NAMED["hermes"]


@pytest.mark.parametrize("name", ["chatml", "gemma3", "phi3_5"])
def test_a_template_without_tools_is_refused(name):
    with pytest.raises(UserError, match=r"^the chat template does not write tools, so .* set data\.template") as raised:
        CallFormat.of(chat(name), [TOOL])
    assert "\n" not in str(raised.value)


def test_a_template_that_writes_tools_but_no_calls_is_refused():
    source = "{{ tools | tojson if tools else '' }}" + tokenizer("chatml").chat_template
    with pytest.raises(UserError, match=r"^the chat template does not write calls of tools; "):
        CallFormat.of(Chat(tokenizer("chatml"), source), [TOOL])


def test_null_is_not_written_as_a_word_by_a_template_that_leaves_out_the_line_of_an_empty_content():
    text = chat("glm4moe").render([ASK, calls_of(("multiply", ARGUMENTS))], [TOOL])
    assert text.endswith(
        "<|assistant|>\n<think></think>\n<tool_call>multiply\n<arg_key>a</arg_key>\n<arg_value>6</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"
    )


def test_a_tokenizer_that_removes_the_space_before_a_comma_leaves_arguments_as_they_were():
    spaced = copy.deepcopy(tokenizer("llama3_1"))
    spaced.clean_up_tokenization_spaces = True
    spaced.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True  # as older versions
    ids = spaced("a , b")["input_ids"]
    assert spaced.decode(ids) == "a, b"
    arguments = {"text": "a , b"}
    _, (call,) = CallFormat.of(Chat(spaced), [TOOL]).parse(sampled("llama3_1", calls_of(("f", arguments))))
    assert call.arguments == arguments
