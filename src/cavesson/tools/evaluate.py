"""Evaluation of a model on held-out data: `cavesson evaluate`."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from cavesson.data.chat import Chat
from cavesson.errors import print_error
from cavesson.ops.intervals import Interval
from cavesson.record.files import write_text
from cavesson.record.write.writable import check_new
from cavesson.text.counting import counted
from cavesson.tools.as_trained import TrainedBy, as_trained, at_date_of, check_answered, trained_by
from cavesson.tools.generate import load_policy, questions_of, responses, tell
from cavesson.tools.perplexity import Likelihood, measure, read_documents
from cavesson.tools.score import check_scorers, estimates, score_responses, shown
from cavesson.tools.settings import EvaluateSettings


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one model; parts that were not requested are None or empty."""

    model: str
    text: Likelihood | None
    rewards: dict[str, Interval]
    """the sum of all, and every part; of a reward that is only 0 or 1, such as exact_match, the accuracy"""
    responses: list[dict[str, Any]]
    idle: tuple[str, ...] = ()
    """rewards that judge none of the responses"""

    def _judged(self, name: str) -> str:
        """Return how many responses a reward judges, and of how many if it leaves some out."""
        judged, count = sum(one[name] is not None for one in self.responses), len(self.responses)
        return counted(judged, "response") if judged == count else f"{judged} of {counted(count, 'response')}"

    def __str__(self) -> str:
        lines = []
        if self.text is not None:
            text = self.text
            lines = [
                f"perplexity  {text.perplexity:.4g} ({text.nll:.4f} nats per token)",
                f"            {text.tokens} tokens of {text.documents} documents; windows of {text.context} tokens "
                f"every {text.stride}",
            ]
        for name, mean in self.rewards.items():
            lines.append(f"{name}  {shown(mean)}, 95 % interval, {self._judged(name)}")
        lines += [f"{name}  judges none of {counted(len(self.responses), 'response')}" for name in self.idle]
        return "\n".join(lines)


def evaluate(model: str, settings: EvaluateSettings) -> Evaluation:
    """Measure the perplexity of a text, the rewards of sampled responses, or both.

    Raises:
        UserError: the model, the data or the reward does not exist, or the file to write exists.
    """
    if settings.out is not None:
        check_new(settings.out)
    run = trained_by(model)
    with at_date_of(run):
        evaluation = _evaluation(model, settings, run)
    if settings.out is not None:
        content = json.dumps(asdict(evaluation), indent=2, ensure_ascii=False, default=str)
        write_text(settings.out, content)
    return evaluation


def _evaluation(model: str, settings: EvaluateSettings, run: TrainedBy | None) -> Evaluation:
    asks = bool(settings.data.path or settings.data.mix)
    check_answered([run] if asks else [], settings.environment)
    settings, line = as_trained(model, settings, run)
    policy, tokenizer = load_policy(model, settings)
    questions = questions_of(settings, tokenizer, run) if asks else None
    if questions is not None:
        check_scorers(settings, settings.device, questions)
    has_text = bool(settings.text.path or settings.text.mix)
    documents = read_documents(settings.text, Chat.of(settings.text, tokenizer)) if has_text else []
    print_error(line)
    if questions is not None:
        tell(questions)
    likelihood = measure(policy, documents, settings.text, settings.batch_size) if has_text else None
    rewards: dict[str, Interval] = {}
    idle: tuple[str, ...] = ()
    answers: list[dict[str, Any]] = []
    if questions is not None:
        said = list(responses(policy, tokenizer, questions, settings))
        parts = score_responses(said, settings, settings.device, questions.conversation)
        rewards = estimates(parts, [one.group for one in said])
        idle = tuple(name for name in parts if name not in rewards)
        answers = [one.facts | {name: parts[name][n] for name in parts} for n, one in enumerate(said)]
    return Evaluation(model, likelihood, rewards, answers, idle)
