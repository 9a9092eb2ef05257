"""The words of the world in Chinese, written without spaces: another language and another tokenizer."""

import re

from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from benchmarks.faults import world

CHINESE = (
    "酒店 花园 展馆 学校 市场 车站 书馆 港口 剧院 村庄 "
    "房间 饭菜 大门 灯光 音乐 小路 屋顶 清水 桌子 床铺 窗户 楼梯 "
    "导游 孩子 司机 老师 邻居 客人 厨师 医生 "
    "良好 明亮 干净 平静 温暖 可爱 善良 新鲜 快乐 安静 "
    "糟糕 昏暗 肮脏 吵闹 寒冷 丑陋 粗鲁 陈旧 悲伤 破损 "
    "宽大 细小 古老 崭新 绿色 圆形 早间 晚间 附近 敞开 "
    "曾是 看着 似乎 觉得 保持 变成 "
    "找到 喜欢 离开 看见 留下 询问 "
    "这 一 和 但 很 不 的 里 与 有 我们 他们 它 我 也 就 "
    "。 ， ！ # :) ```"
)
TRANSLATED = dict(zip(world.WORDS, CHINESE.split(), strict=True))
BACK = {there: here for here, there in TRANSLATED.items()}
_WORDS = re.compile("|".join(map(re.escape, sorted(BACK, key=len, reverse=True))))


def tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the world with its words in Chinese: the ids mean the same."""
    return world.new_tokenizer(
        [world.END, world.PAD, world.START, *map(TRANSLATED.__getitem__, world.WORDS)], decoders.Fuse()
    )


def prompts() -> list[str]:
    """Return the prompts in Chinese; spaces tell the tokenizer where a word begins."""
    return [" ".join(TRANSLATED[word] for word in prompt.split()) for prompt in world.prompts()]


def english(text: str) -> str:
    """Return a text in English, word by word."""
    return " ".join(BACK[word] for word in _WORDS.findall(text))
