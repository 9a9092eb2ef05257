"""Settings of data: its sources, the order of the rows, and how they become tokens."""

from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cavesson.config import Settings
from cavesson.config_paths import LocalPath, RecipeText, full_function, in_folder
from cavesson.errors import UserError
from cavesson.text.reach import parsed

SpecialTokenMode = Literal["text", "control"]
_GIVEN_TO_TEMPLATES = {
    *("messages", "conversations", "tools", "add_generation_prompt", "continue_final_message", "chat_template"),
    *("return_assistant_tokens_mask", "strftime_now", "raise_exception", "bos_token", "eos_token", "unk_token"),
    *("sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens"),
}


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    if ours := sorted(set(options) & _GIVEN_TO_TEMPLATES):
        raise ValueError(f"{ours[0]!r} is set by Cavesson and cannot be an option of the template")
    return options


TemplateOptions = Annotated[dict[str, Any], AfterValidator(_check_options)]
"""Further variables of a chat template."""


def _as_tools(value: object) -> object:
    tools = [tool for one in _items(value) for tool in _schemas(one)]
    functions = [one for tool in tools if isinstance(one := tool.get("function"), dict)]
    names = Counter(str(one["name"]) for one in functions if "name" in one)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"two tools are called {twice[0]!r}")
    return tuple(tools)


def _items(value: object) -> list[object]:
    found = parsed(value)
    found = in_folder(found, value.folder) if isinstance(value, RecipeText) and found is not value else found
    return [parsed(tool) for tool in found] if isinstance(found, list | tuple) else [found]


def _schemas(tool: object) -> list[dict[str, Any]]:
    if isinstance(tool, dict) and tool:
        return [tool]
    if not isinstance(tool, str) or ":" not in tool or tool.lstrip().startswith(("[", "{")):
        raise ValueError(
            'write a list of functions such as ["tools.py:search"], of schemas such as '
            '[{type = "function", function = {…}}], or such a list as JSON text'
        )
    from cavesson.data.tool_schemas import schemas_named

    try:
        return schemas_named(full_function(tool))
    except UserError as error:
        raise ValueError(str(error)) from error


OfferedTools = Annotated[tuple[dict[str, Any], ...], BeforeValidator(_as_tools)]
"""Schemas of tools, as chat templates take them; names of functions are replaced by their schemas."""


class SourceSettings(Settings):
    """One source of rows and how it is read."""

    path: LocalPath | None = None
    """a file (.txt, .jsonl, .json, .csv, .parquet, each also as .gz), a folder or glob of such files, a folder that
    `datasets` saved, or the name of a Hub data set"""
    split: str = "train"
    """split of a Hub data set, or of a folder whose files are named after their split"""
    subset: str | None = None
    """configuration of a Hub data set that has several"""
    format: str | None = None
    """how the columns are read, such as messages or preference; none = detected from their names"""
    columns: dict[str, str] = Field(default={})
    """Cavesson's column names and those of the source, such as {prompt = "question"}; dots reach into objects, such as
    {ground_truth = "reward_model.ground_truth"}"""
    ignore: tuple[str, ...] = ()
    """columns that the model is not shown and does not learn; rewards and the record still get them"""
    weight: float = Field(1.0, gt=0)
    """share of the rows that come from this source, relative to the other sources of a mix"""

    @model_validator(mode="after")
    def _check_ignored(self) -> Self:
        if both := sorted(set(self.ignore) & set(self.columns.values())):
            raise ValueError(f"columns and ignore both name {both[0]!r}; it is either used or ignored")
        return self


class DataSettings(SourceSettings):
    """The rows of a run: one source, or a mix of several."""

    mix: tuple[SourceSettings, ...] = ()
    """several sources instead of `path`; each is repeated as often as its weight needs"""
    shuffle: bool = True
    """shuffle the rows anew in every pass over the data"""
    validation: float = Field(0.0, ge=0, lt=1)
    """fraction of the rows, taken from the end of every source, that is held out"""
    validation_path: LocalPath | None = None
    """a separate source of held-out rows; format, columns and ignore are those of `path`"""
    validation_split: str | None = None
    """split to hold out, of `validation_path` or else of `path`"""
    max_rows: int | None = Field(None, ge=1)
    """rows read from the start of every source; none = all"""
    stream: bool = False
    """read rows while training, for data that does not fit in memory"""
    shuffle_buffer: int = Field(10_000, ge=1)
    """rows that are read ahead and shuffled together when streaming"""

    @property
    def has_held_out_source(self) -> bool:
        """Whether held-out rows come from a source of their own."""
        return self.validation_path is not None or self.validation_split is not None

    @property
    def holds_out(self) -> bool:
        """Whether rows are held out."""
        return self.validation > 0 or self.has_held_out_source

    @model_validator(mode="after")
    def _check(self) -> Self:
        apart = self.has_held_out_source
        if self.path is not None and self.mix:
            raise ValueError("give path or mix, not both")
        if self.validation and apart:
            raise ValueError("give validation, or validation_path and validation_split, not both")
        if self.validation and self.stream:
            raise ValueError("a fraction of a stream cannot be held out; give validation_path or validation_split")
        if self.mix and apart and self.validation_path is None:
            raise ValueError("with a mix, validation_split needs a validation_path")
        self.refuse("weight", "here: it is a share of a mix; set it in the entries of data.mix")
        if not (self.stream and self.shuffle):
            self.refuse("shuffle_buffer", "without stream and shuffle")
        if self.mix:
            for name in ("split",) if apart else ("split", "subset", "format", "columns", "ignore"):
                self.refuse(name, "with mix; set it in the entries of the mix")
        return self


class ChatSettings(DataSettings):
    """Data whose conversations become text."""

    template: LocalPath | None = None
    """a chat template instead of the tokenizer's own: a .jinja file, or the template itself"""
    template_options: TemplateOptions = Field(default={})
    """further variables of the chat template, such as {enable_thinking = false}"""
    system: str | None = None
    """system message of conversations that do not begin with one"""
    tools: OfferedTools = ()
    """tools of conversations without their own: functions and environments, such as ["tools.py:search"], or schemas"""
    chat: bool = False
    """turn plain texts into conversations: the prompt is the user's turn, the response the assistant's"""
    special_tokens: SpecialTokenMode = "text"
    """special tokens written in the data, such as <|im_end|>: text like any other, or control tokens, for templates
    written by hand"""


class PromptSettings(ChatSettings):
    """Where the prompts come from."""

    max_prompt_tokens: int = Field(256, ge=1)
    """longer prompts are dropped, counted and named: the longest one sets the memory a step needs"""


class PairSettings(ChatSettings):
    """Pairs of responses as tokens."""

    max_length: int = Field(1024, ge=2)
    """tokens of prompt and response together"""
    overlong: Literal["truncate", "drop"] = "truncate"
    """longer ones: cut off their end, or drop them; either way they are counted"""


class TextSettings(PairSettings):
    """Texts and conversations as tokens."""

    learn: Literal["response", "all"] = "response"
    """which tokens are learned: response = those after the prompt, and of a conversation only the assistant's, end
    tokens included; all = every token but the first, which has no context"""


class AnyDataSettings(TextSettings, PromptSettings):
    """Data of any kind."""


class ViewSettings(Settings):
    """Look at data as a run reads it."""

    tokenizer: LocalPath = "tiny"
    """the model whose tokenizer and chat template are used; tiny = one token per byte, and no chat template"""
    kind: Literal["prompts", "demonstrations", "pairs", "labelled"] | None = None
    """kind of the rows; none = that of the first row"""
    data: AnyDataSettings = AnyDataSettings()
    """where the rows are, and how they become tokens"""


class ShowSettings(ViewSettings):
    """Show a row of data token by token."""

    row: int = Field(1, ge=1)
    """number of the row"""


class LengthSettings(ViewSettings):
    """Count the tokens of data and the rows that its limits drop."""
