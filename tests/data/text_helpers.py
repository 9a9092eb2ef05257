"""Tokenizers and chat templates that look like those of the field."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase
from transformers import PreTrainedTokenizerFast as FastTokenizer

SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the old bridge is over the river",
    "What is it? It is a river.",
    "user assistant system\n\n",
    "  two  spaces",
]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Llama 2's: BOS before every question, no sign for where the answer begins.
LLAMA2 = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant speak') }}{% endif %}{% endfor %}"
)
# As Phi-3's: the end token closes the conversation, and no turn before the last.
PHI3 = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# As those of reasoning models: what was thought before the last answer is forgotten.
FORGETFUL = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if not loop.last and '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_SIGNS = (
    "{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def byte_pairs(*, bos: bool = False, eos: bool = False, trim: bool = False) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with a few merges.

    Args:
        bos: whether it begins every text with <s>.
        eos: whether it ends every text with </s>.
        trim: whether its offsets leave out the space that a token begins with.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    if trim:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    elif bos or eos:
        single = f"{'<s> ' * bos}$A{' </s>' * eos}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return FastTokenizer(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def word_pieces() -> PreTrainedTokenizerBase:
    """A BPE tokenizer that writes the space before a word as ▁, as SentencePiece does, and begins texts with <s>."""
    tokenizer = Tokenizer(models.BPE(unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = sorted({letter for text in CORPUS for letter in text} - {" "})
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return FastTokenizer(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
