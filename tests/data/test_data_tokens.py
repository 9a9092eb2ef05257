import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_helpers import CHATML, LLAMA2, MARKED, NO_SIGNS, byte_pairs, word_pieces
from transformers import PreTrainedTokenizerBase

from cavesson.data.examples import Tokens, tokenize_demonstrations, tokenize_pairs
from cavesson.data.settings import PairSettings, TextSettings
from cavesson.data.types import Demonstration, Pair, Turn
from cavesson.errors import UserError
from cavesson.models.tiny import tiny_tokenizer

BPE = byte_pairs()
QUESTION = (Turn("user", "What is it?"),)
CHAT = TextSettings(template=CHATML)
ANSWER = (Turn("assistant", "It is a river."),)
MORE = (*ANSWER, Turn("user", "old?"), Turn("assistant", "  the old\n"))


def one(row: Demonstration, tokenizer: PreTrainedTokenizerBase = BPE, **options: object) -> Tokens | None:
    return next(iter(tokenize_demonstrations([row], tokenizer, TextSettings(**options))), None)


def learned(tokens: Tokens, tokenizer: PreTrainedTokenizerBase = BPE) -> list[str]:
    """The learned stretches, as texts."""
    text, stretches = "", []
    for token, learn in zip((*tokens.ids, None), (*tokens.learn, False), strict=True):
        if learn:
            text += tokenizer.decode([token])
        elif text:
            stretches.append(text)
            text = ""
    return stretches


def put_together(turns: tuple[Turn, ...], first: int, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """ChatML of its pieces: special tokens by number, texts tokenized between them."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids, learn = [], []
    for number, turn in enumerate(turns):
        ours = turn.role == "assistant" and number >= first
        header, whole = tokenizer(f"{turn.role}\n")["input_ids"], tokenizer(f"{turn.role}\n{turn.content}")["input_ids"]
        same = max(n for n in range(len(header) + 1) if header[:n] == whole[:n])
        ids += [start, *whole, end, *tokenizer("\n")["input_ids"]]
        learn += [False, *[False] * same, *[ours] * (len(whole) - same), ours, False]
    return Tokens(tuple(ids), tuple(learn))


def test_a_text_is_learned_after_its_prompt_and_ends():
    # One token per byte, so that the ids are known: the response of three bytes and the end token.
    tokenizer = tiny_tokenizer()
    (a,) = tokenizer("a")["input_ids"]
    assert one(Demonstration("aa", "aaa"), tokenizer) == Tokens((a,) * 5 + (0,), (False,) * 2 + (True,) * 4)
    assert one(Demonstration("aa", "aaa"), tokenizer, learn="all") == Tokens((a,) * 5 + (0,), (False,) + (True,) * 5)
    # Without a prompt the first token has nothing to be predicted from.
    assert one(Demonstration("", "aaa"), tokenizer) == Tokens((a,) * 3 + (0,), (False,) + (True,) * 3)
    # An end token that is there already is not written twice.
    assert one(Demonstration("aa", "a<|endoftext|>"), tokenizer, special_tokens="control").ids == (a, a, a, 0)


def test_a_tokenizer_without_an_end_token_ends_nothing():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    assert len(one(Demonstration("aa", "aaa"), tokenizer).ids) == 5


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_the_prompt_is_what_a_sampler_sees_and_ends_once(bos, eos):
    plain, tokenizer = byte_pairs(), byte_pairs(bos=bos, eos=eos)
    tokens = one(Demonstration("What is", " the river"), tokenizer)
    start, end = (plain.bos_token_id,) * bos, (plain.eos_token_id,)
    prompt = start + tuple(plain("What is")["input_ids"])
    assert tokens.ids == prompt + tuple(plain(" the river")["input_ids"]) + end
    assert tokens.learn.index(True) == len(prompt)
    assert all(tokens.learn[len(prompt) :])


def test_a_token_of_both_is_learned_and_noted():
    # " river" is one token, and so is " " alone at the end of the prompt.
    result = tokenize_demonstrations(
        [Demonstration("the", " river"), Demonstration("the ", "river")], BPE, TextSettings(path="a.jsonl")
    )
    first, second = result
    assert first == second
    assert learned(second) == [" river</s>"]
    assert result.notes() == [
        "1 × one token spans prompt and response: it is learned, and sampling sees a different prompt "
        "(first: a.jsonl: row 2)"
    ]


def test_a_token_of_the_header_and_the_answer_is_noted_too():
    # Two line breaks are one token, of which the template writes the first.
    result = tokenize_demonstrations([Demonstration(QUESTION, (Turn("assistant", "\n"),))], BPE, CHAT)
    (tokens,) = result
    assert learned(tokens) == ["\n\n<|im_end|>"]
    assert len(result.notes()) == 1
    plain = tokenize_demonstrations([Demonstration(QUESTION, ANSWER)], BPE, CHAT)
    assert (len(list(plain)), plain.notes()) == (1, [])


words = st.text(alphabet="theold rivr\n.?", max_size=12)


@given(words, words, st.booleans())
def test_every_byte_of_a_text_is_there_and_what_is_learned_holds_the_response(prompt, response, bos):
    tokenizer = byte_pairs(bos=bos)
    tokens = one(Demonstration(prompt, response), tokenizer)
    if tokens is None:  # nothing but an end token, which nothing comes before
        assert not prompt + response
        assert not bos
        return
    ids = [token for token in tokens.ids if token != tokenizer.bos_token_id]
    assert tokenizer.decode(ids) == prompt + response + "</s>"
    start = tokens.learn.index(True)
    alone = tokenizer(prompt)["input_ids"]
    assert tokens.ids[:start] == tuple(alone[:start]) or start == 1
    if list(tokens.ids[: len(alone)]) == alone:
        assert start == max(1, len(alone))
    assert all(tokens.learn[start:])


contents = st.text(alphabet="theold rivr\n.?é🙂", max_size=12)


@given(st.lists(contents, min_size=2, max_size=6), st.booleans(), st.booleans())
@settings(deadline=None)
def test_a_conversation_is_what_its_pieces_make_together(texts, whole, trim):
    turns = tuple(Turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))
    first = 1 if whole else 2 * (len(turns) // 2) - 1
    tokenizer = byte_pairs(trim=trim)
    expected = put_together(turns, first, tokenizer)
    for template in (CHATML, MARKED):
        assert one(Demonstration(turns[:first], turns[first:]), tokenizer, template=template) == expected


@pytest.mark.parametrize("tokenizer", [byte_pairs(), word_pieces(), tiny_tokenizer()], ids=["bpe", "▁", "bytes"])
def test_the_mask_is_transformers_where_the_template_marks_answers(tokenizer):
    turns = QUESTION + MORE
    theirs = tokenizer.apply_chat_template(
        [{"role": turn.role, "content": turn.content} for turn in turns],
        chat_template=MARKED,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ours = one(Demonstration(QUESTION, MORE), tokenizer, template=MARKED)
    assert list(ours.ids) == theirs["input_ids"]
    assert list(map(int, ours.learn)) == theirs["assistant_masks"]


def test_only_the_assistant_s_turns_of_the_response_are_learned():
    answers = ["It is a river.<|im_end|>", "  the old\n<|im_end|>"]
    for template in (CHATML, MARKED):
        assert learned(one(Demonstration(QUESTION, MORE), template=template)) == answers
        assert learned(one(Demonstration(QUESTION + MORE[:2], MORE[2:]), template=template)) == answers[1:]
    everything = one(Demonstration(QUESTION, MORE), template=CHATML, learn="all")
    assert everything.learn == (False, *[True] * (len(everything.ids) - 1))


def test_texts_become_conversations_on_request():
    asked = one(Demonstration("What is it?", "It is a river."), template=CHATML, chat=True, system="Be kind.")
    assert asked == one(Demonstration((Turn("system", "Be kind."), *QUESTION), ANSWER), template=CHATML)
    unasked = tokenize_demonstrations(
        [Demonstration("", "It is a river.")], BPE, TextSettings(template=CHATML, chat=True)
    )
    assert list(unasked) == []
    assert unasked.notes()[0].startswith("1 × dropped: the assistant speaks first")


def test_texts_and_conversations_may_be_mixed():
    rows = [Demonstration("the", " old"), Demonstration(QUESTION, ANSWER), Demonstration("old", " bridge")]
    options = TextSettings(template=CHATML)
    together = list(tokenize_demonstrations(rows * 400, BPE, options))
    assert together == [one(row, template=CHATML) for row in rows] * 400


def test_a_template_may_have_no_special_token():
    assert learned(one(Demonstration(QUESTION, MORE), template=NO_SIGNS)) == ["It is a river.\n", "  the old\n\n"]


def test_a_template_writes_bos_itself():
    tokenizer = byte_pairs(bos=True)
    tokens = one(Demonstration(QUESTION, ANSWER), tokenizer, template=LLAMA2)
    assert tokens.ids.count(tokenizer.bos_token_id) == 1
    assert learned(tokens, tokenizer) == [" It is a river. </s>"]


def test_two_bos_tokens_are_refused():
    tokenizer = byte_pairs(bos=True)
    with pytest.raises(
        UserError, match=r"^x\.jsonl: row 2: the text begins with two BOS tokens \(<s>\); the tokenizer"
    ):
        rows = [Demonstration("the", " old"), Demonstration("<s>the", " old")]
        list(tokenize_demonstrations(rows, tokenizer, TextSettings(path="x.jsonl", special_tokens="control")))
    # Without a tokenizer that adds one, the one in the text is the only one.
    assert one(Demonstration("<s>the", " old"), special_tokens="control").ids.count(0) == 1
    with pytest.raises(
        UserError, match=r"row 1: the text begins with two BOS tokens .* chat template or the first turn"
    ):
        one(Demonstration(QUESTION, ANSWER), template="{{ bos_token }}" + LLAMA2)


def test_a_mistake_names_the_row():
    with pytest.raises(
        UserError, match=r"^the data: row 2: this is a conversation, but the tokenizer has no chat templ"
    ):
        list(tokenize_demonstrations([Demonstration("", "a"), Demonstration(QUESTION, ANSWER)], BPE, TextSettings()))
    with pytest.raises(UserError, match=r"row 1: this is plain text; data\.system is for conversations"):
        one(Demonstration("a", "b"), system="Be kind.")
    with pytest.raises(UserError, match="row 1: the text contains half of a surrogate pair"):
        one(Demonstration("a", "\ud83d"))


def test_a_row_that_cannot_be_rendered_is_dropped_and_counted():
    wrong = [Demonstration((Turn("tool", "4"),), ANSWER), Demonstration(QUESTION, (Turn("user", "b"),))]
    result = tokenize_demonstrations([*wrong, Demonstration(QUESTION, ANSWER)], BPE, TextSettings(template=LLAMA2))
    assert [learned(tokens) for tokens in result] == [[" It is a river. </s>"]]
    assert result.notes() == [
        "1 × dropped: the chat template cannot render this conversation: Only user and assistant speak "
        "(first: the data: row 1)",
        "1 × dropped: there is no turn of the assistant that may be learned (first: the data: row 2)",
    ]


def test_long_texts_are_cut_or_dropped_and_counted():
    tokenizer = tiny_tokenizer()
    rows = [Demonstration("ab", "c"), Demonstration("ab", "cd"), Demonstration("abc", "d"), Demonstration("abcd", "e")]

    def lengths(**options: object) -> tuple[list[int], list[str]]:
        result = tokenize_demonstrations(rows, tokenizer, TextSettings(path="a", **options))
        return [len(tokens.ids) for tokens in result], result.notes()

    assert lengths(max_length=6) == ([4, 5, 5, 6], [])
    assert lengths(max_length=4) == (
        [4, 4, 4],
        [
            "2 × longer than data.max_length = 4 tokens, and cut there (first: a: row 2)",
            "1 × dropped: no token of a response is within data.max_length = 4 (first: a: row 4)",
        ],
    )
    assert lengths(max_length=4, overlong="drop") == (
        [4],
        ["3 × longer than data.max_length = 4 tokens, and dropped (first: a: row 2)"],
    )


def test_a_pair_is_two_demonstrations_of_one_prompt():
    row = Pair("What is", " the river", " it", margin=0.5)
    (pair,) = tokenize_pairs([row], BPE, PairSettings())
    assert pair.chosen == one(Demonstration("What is", " the river"))
    assert pair.rejected == one(Demonstration("What is", " it"))
    assert pair.margin == 0.5
    talk = Pair(QUESTION, ANSWER, (Turn("assistant", "old"),))
    (pair,) = tokenize_pairs([talk], BPE, PairSettings(template=CHATML))
    assert learned(pair.chosen) == ["It is a river.<|im_end|>"]
    assert learned(pair.rejected) == ["old<|im_end|>"]
    assert pair.margin is None


def test_responses_of_a_pair_begin_at_the_same_token():
    # " river" takes the prompt's last space into its first token; "!" does not, and yet it is learned from there on.
    result = tokenize_pairs([Pair("the ", "river", "!")], BPE, PairSettings())
    (pair,) = result
    assert learned(pair.chosen) == [" river</s>"]
    assert learned(pair.rejected) == [" !</s>"]
    assert len(result.notes()) == 1


def test_pairs_without_a_difference_are_dropped():
    rows = [Pair("the", " old", " old"), Pair("the", " old bridge", " old river"), Pair("the", " old", " river")]
    result = tokenize_pairs(rows, tiny_tokenizer(), PairSettings(path="a", max_length=7))
    assert len(list(result)) == 1
    assert "2 × dropped: chosen and rejected are the same tokens (first: a: row 1)" in result.notes()


def test_a_pair_of_which_one_response_is_nothing_is_dropped():
    tokenizer = tiny_tokenizer()
    assert len(list(tokenize_pairs([Pair("ab", "", "c")], tokenizer, PairSettings()))) == 1
    tokenizer.eos_token = None
    result = tokenize_pairs([Pair("ab", "", "c")], tokenizer, PairSettings(path="a"))
    assert list(result) == []
    assert result.notes() == ["1 × dropped: no token of a response is within data.max_length = 1024 (first: a: row 1)"]


def test_ids_and_mask_are_those_of_trl(tmp_path):
    trl = pytest.importorskip("trl")
    import datasets

    from cavesson.models.tiny import tiny_model

    rows = [("What is", " it?"), ("the ", "river"), ("the  ", "old"), ("", "It is a river."), ("What is it?", "")]
    chats = [(QUESTION, ANSWER), (QUESTION + MORE[:2], MORE[2:])]
    tokenizer = byte_pairs()
    tokenizer.chat_template = MARKED
    asked = [{"prompt": prompt, "completion": response} for prompt, response in rows]
    said = [
        {"prompt": [vars(turn) for turn in prompt], "completion": [vars(turn) for turn in response]}
        for prompt, response in chats
    ]
    for dataset, ours in ((asked, rows), (said, chats)):
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False, assistant_only_loss=dataset is said
        )
        trainer = trl.SFTTrainer(
            tiny_model(), arguments, train_dataset=datasets.Dataset.from_list(dataset), processing_class=tokenizer
        )
        for theirs, row in zip(trainer.train_dataset, ours, strict=True):
            tokens = one(Demonstration(*row), tokenizer)
            assert theirs["input_ids"] == list(tokens.ids)
            # TRL keeps a label for the first token, which its loss never reads.
            assert [label != -100 for label in theirs["labels"]][1:] == list(tokens.learn)[1:]


def test_pairs_are_those_of_trl(tmp_path):
    trl = pytest.importorskip("trl")
    import datasets

    from cavesson.models.tiny import tiny_model

    rows = [("What is", " it?", " old"), ("the ", "river", "!"), ("the  ", "old", " old"), ("What is it?", "", "It is")]
    tokenizer = byte_pairs()
    trainer = trl.DPOTrainer(
        tiny_model(),
        ref_model=tiny_model(),
        args=trl.DPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False),
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in rows]
        ),
        processing_class=tokenizer,
    )
    pairs = tokenize_pairs([Pair(*row) for row in rows], tokenizer, PairSettings())
    for theirs, pair in zip(trainer.train_dataset, pairs, strict=True):
        for ids, ours in ((theirs["chosen_ids"], pair.chosen), (theirs["rejected_ids"], pair.rejected)):
            assert theirs["prompt_ids"] + ids == list(ours.ids)
            assert ours.learn == (False,) * len(theirs["prompt_ids"]) + (True,) * len(ids)
