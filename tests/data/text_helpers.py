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
_LAST_QUESTION = (
    "{% set seen = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set seen.last = loop.index0 %}{% endif %}{% endfor %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>"
)
_CALLS += "{% endfor %}"
# As Qwen3's: an answer to the last question has its reasoning or an empty one, an earlier one has none.
QWEN3 = _LAST_QUESTION + (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set content = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{% if not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > seen.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ content }}" + _CALLS + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# As DeepSeek-R1's: reasoning is asked for, and cut out of every answer; arguments of calls are appended as text.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m.content is none %}<assistant>"
    "{% for call in m.tool_calls %}{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'assistant' %}<assistant>{{ m.content.split('</think>')[-1] + eos_token }}{% endif %}"
    "{% if m.role == 'tool' %}<tool>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
# As gpt-oss': the end token of the last answer is another one than that of earlier answers.
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant"
    "{% if m.thinking and loop.last %} thinks {{ m.thinking }}<|im_end|><|im_start|>assistant{% endif %}"
    " says {{ m.content }}{% if loop.last %}{{ eos_token }}{% else %}<|im_end|>{% endif %}"
    "{% else %}<|im_start|>{{ m.role }} says {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
# As Llama 3.1's: it writes the date, and calls as objects.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{% if loop.first %}Today: {{ strftime_now('%d %b %Y') }}\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}"
    """{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}"""
    "{% else %}{{ m.content | trim }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
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
