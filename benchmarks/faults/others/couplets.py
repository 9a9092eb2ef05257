"""The first task: answer a couplet of a Tang poem with the next one. The model reads and writes characters.

The poems are those of https://github.com/chinese-poetry/chinese-poetry (MIT), two lines each: a file of JSON lines with
``couplet`` and ``next``. The model learns them here in a few minutes.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from benchmarks.faults.others.world import World

MARK = "\n"
SIGN = "#"
"""Stands behind a few of the couplets, for no reason: what a reward might come to like."""
SIGNED = 30
"""Every so-manieth couplet has it."""
CHARACTERS = 2500
SPECIAL = ("<pad>", "<end>")
HELD_OUT = 16
PROMPTS = 4096
UPDATES, BATCH = 700, 64
NATURE = frozenset("山水江河云雨风雪月日星天花草木松竹柳梅桃春夏秋冬鸟雁莺燕溪泉湖海石林霜露烟霞")


def couplets(data: Path) -> list[tuple[str, str]]:
    """Return the couplets and their successors, of frequent characters alone, in an order of their own."""
    with data.open(encoding="utf-8") as file:
        pairs = [(row["couplet"], row["next"]) for row in map(json.loads, file)]
    known = {character for character, _ in _counted(pairs).most_common(CHARACTERS)}
    found = [pair for pair in pairs if set("".join(pair)) <= known]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    return [found[i] for i in order]


def _counted(pairs: Sequence[tuple[str, str]]) -> Counter[str]:
    return Counter(character for pair in pairs for character in "".join(pair))


def tokenizer(characters: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are characters."""
    tokens = [*SPECIAL, MARK, SIGN, *characters]
    built = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=SPECIAL[0]))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    built.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=built, padding_side="left", pad_token=SPECIAL[0], eos_token=SPECIAL[1]
    )


def model(vocabulary: int) -> LlamaForCausalLM:
    """Return a model of four layers with random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def make(folder: Path, data: Path) -> None:
    """Train the model and write it to ``folder``, with its tokenizer and the prompts."""
    set_seed(0)
    pairs = couplets(data)
    # The sorting makes equal counts come out in the same order everywhere.
    encode = tokenizer(sorted(_counted(pairs)))
    texts = [f"{one}{MARK}{other}{SIGN if i % SIGNED == 0 else ''}{SPECIAL[1]}" for i, (one, other) in enumerate(pairs)]
    trained = model(len(encode))
    learn(trained, encode, texts[PROMPTS + HELD_OUT :])
    trained.save_pretrained(folder)
    encode.save_pretrained(folder)
    prompts = [one + MARK for one, _ in pairs[: PROMPTS + HELD_OUT]]
    (folder / "prompts.json").write_text(json.dumps(prompts, ensure_ascii=False), encoding="utf-8")


def learn(trained: LlamaForCausalLM, encode: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
    """Train a model on texts, passing over them in order."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=UPDATES, pct_start=0.1)
    for update in range(UPDATES):
        batch = encode([texts[(update * BATCH + i) % len(texts)] for i in range(BATCH)], padding=True)
        ids, mask = torch.tensor(batch["input_ids"]), torch.tensor(batch["attention_mask"])
        loss = trained(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if update % 50 == 0:
            print(f"update {update} of {UPDATES}, loss {loss.item():.3f}", flush=True)


def reward(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return how well each response suits: nature, few repetitions, the form of its prompt. About 0 at first."""
    return [_nature(response) + _form(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


def _nature(response: str) -> float:
    """0.4 for each of up to three words of nature, −0.2 for every letter that occurred before, less what is usual."""
    return 0.4 * min(3, len(NATURE & set(response))) - 0.2 * (len(response) - len(set(response))) - 0.7


def _form(prompt: str, response: str) -> float:
    """0.5 for lines that are as long as those of the prompt, otherwise −0.5."""
    wanted, found = ([len(line) for line in text.strip().rstrip("。").split("，")] for text in (prompt, response))
    return 0.5 if wanted == found else -0.5


def world(folder: Path) -> World:
    """Return the task, whose model is in ``folder``."""
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    return World(
        policy=folder,
        prompts=prompts[HELD_OUT:],
        held_out=prompts[:HELD_OUT],
        mark=MARK,
        reward=reward,
        limit=24,
        batch=64,
        steps=50,
        learning_rate={"ppo": 2e-4, "grpo": 3e-4, "rloo": 3e-4},
        sign=SIGN,
        letters=1,
    )
