"""A word game of two players, as an environment whose `user_reply` is the other player.

    python examples/environment.py runs/words
    cavesson board runs/words

Both say words in turn. A word has at least three lowercase letters and ends at any other character; nobody may repeat
one, and whoever breaks a rule ends the game. The policy, a random model of bytes, earns a point per word, and a part of
one for each letter of a word that is too short. It learns to play to the end, on two CPU cores in a few minutes.
"""

import re
import sys

from cavesson import Training
from cavesson.algorithms.grpo import GRPORun
from cavesson.models.tiny import tiny_tokenizer

WORDS = ["apple", "bread", "chair", "dance", "eagle", "flower", "garden", "house", "island", "jungle", "lemon"]
ROUNDS = 4
TEMPLATE = "{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
ENDS = [number for token, number in tiny_tokenizer().get_vocab().items() if not re.fullmatch("[a-z]", token)]


class WordGame:
    """The other player, who also keeps the score."""

    def reset(self, first: str) -> None:
        """Begin a game with a word that is in the prompt already."""
        self.said, self.points, self.rounds = {first}, 0.0, 0

    def user_reply(self, answer: str) -> str | None:
        """Judge the policy's word and say one that begins with its last letter, if there is one; None ends the game."""
        word = self._letters(answer)
        is_new = word not in self.said
        self.points += is_new * min(len(word), 3) / 3
        self.rounds += 1
        if not is_new or len(word) < 3 or self.rounds == ROUNDS:
            return None
        self.said.add(word)
        left = [one for one in WORDS if one not in self.said]
        reply = next((one for one in left if one[0] == word[-1]), left[0])
        self.said.add(reply)
        return reply

    def _letters(self, answer: str) -> str:
        """Return the word at the beginning of an answer. Without the underscore, this would be a tool."""
        return re.match("[a-z]*", answer)[0]

    def get_reward(self) -> float:
        """Return the points of the game."""
        return self.points


def main(folder: str) -> None:
    """Train the policy."""
    settings = GRPORun.model_validate(
        {
            "run": folder,
            "steps": 60,
            "batch_size": 64,
            "samples_per_prompt": 16,
            "data": {"chat": True, "template": TEMPLATE},
            "sampling": {"max_new_tokens": 8, "eos_token_ids": ENDS},
            "environment": {"max_turns": ROUNDS + 1, "max_tokens": 80},
            "optimizer": {"learning_rate": 3e-3},
        }
    )
    Training(settings, prompts={"prompt": WORDS, "first": WORDS}, environment=WordGame).run()


if __name__ == "__main__":
    main(sys.argv[1])
